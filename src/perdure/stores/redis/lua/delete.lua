-- Remove what a session owns; its epoch stays, marked as deleted.
-- KEYS: session, log, documents, inbox items, inbox order, segments, dead letters
-- ARGV: epoch, whether posts wait on
-- Returns 0, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
-- Posts are to an id, and outlive a draft.
if not s[2] and ARGV[2] == '0' then redis.call('UNLINK', KEYS[4], KEYS[5]) end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[6], KEYS[7])
redis.call('HDEL', KEYS[1], 'h', 'b', 'x', 'm', 'a', 't', 'c', 'u', 'p')
redis.call('HSET', KEYS[1], 'd', '1', 'r', '1')
return 0
