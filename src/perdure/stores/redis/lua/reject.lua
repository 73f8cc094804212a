-- Move items of an inbox to the dead letters.
-- KEYS: session, inbox items, inbox order, dead letters
-- ARGV: epoch, then the id and the bytes of each letter
-- Returns 0, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
for at = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
  redis.call('ZREM', KEYS[3], ARGV[at])
  redis.call('HDEL', KEYS[2], ARGV[at])
end
return 0
