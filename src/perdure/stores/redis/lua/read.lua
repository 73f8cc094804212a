-- Read documents together with the manifest that names them.
-- KEYS: session, documents
-- ARGV: names; none for all
-- Returns {manifest, name, bytes, name, bytes, ...}.
if redis.call('HGET', KEYS[1], 'd') == 'draft' then return {false} end
local found = {redis.call('HGET', KEYS[1], 'm')}
if #ARGV == 0 then
  for _, part in ipairs(redis.call('HGETALL', KEYS[2])) do found[#found + 1] = part end
  return found
end
for _, name in ipairs(ARGV) do
  local data = redis.call('HGET', KEYS[2], name)
  if data then
    found[#found + 1] = name
    found[#found + 1] = data
  end
end
return found
