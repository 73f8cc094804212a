-- Remove items that are in the log, or move them to the dead letters.
-- KEYS: session, inbox items, inbox order, dead letters
-- ARGV: epoch, then the id of each, and the bytes of its dead letter or ''
-- Returns how many wait on, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
for at = 2, #ARGV, 2 do
  if ARGV[at + 1] ~= '' then redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1]) end
  redis.call('ZREM', KEYS[3], ARGV[at])
  redis.call('HDEL', KEYS[2], ARGV[at])
end
return redis.call('ZCARD', KEYS[3])
