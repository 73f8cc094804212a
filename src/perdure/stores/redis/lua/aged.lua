-- List the blobs of one shelf.
-- KEYS: ages, quarantine
-- Returns {names that are out of the way, the others}.
local away = redis.call('ZRANGE', KEYS[2], 0, -1)
local gone, here = {}, {}
for _, name in ipairs(away) do gone[name] = true end
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if not gone[name] then here[#here + 1] = name end
end
return {away, here}
