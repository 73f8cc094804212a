-- Make a draft a session.
-- KEYS: session
-- ARGV: epoch
-- Returns 0, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
if s[2] then redis.call('HDEL', KEYS[1], 'd', 'x') end
return 0
