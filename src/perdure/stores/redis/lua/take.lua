-- Return what waits for a session, oldest first.
-- KEYS: session, inbox items, inbox order
-- ARGV: epoch, how many at most
-- Returns {'ok', id, bytes, id, bytes, ...}, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if (s[1] or '0') ~= ARGV[1] then
  return {'lost', tonumber(s[1] or 0), s[2] and 1 or 0}
end
local found = {'ok'}
for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, tonumber(ARGV[2]) - 1)) do
  found[#found + 1] = id
  found[#found + 1] = redis.call('HGET', KEYS[2], id) or ''
end
return found
