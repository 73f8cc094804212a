-- Leave items for a session, behind those that wait; an id that waits is not posted again.
-- KEYS: session, inbox items, inbox order
-- ARGV: id and bytes of each item
-- Returns {how many were new, the holder or ''}.
local newest = redis.call('ZREVRANGE', KEYS[3], 0, 0, 'WITHSCORES')
local place = tonumber(newest[2] or 0)
local new = 0
for at = 1, #ARGV, 2 do
  if not redis.call('ZSCORE', KEYS[3], ARGV[at]) then
    place, new = place + 1, new + 1
    redis.call('ZADD', KEYS[3], string.format('%.0f', place), ARGV[at])
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  end
end
local s = redis.call('HMGET', KEYS[1], 'o', 'r', 'd')
return {new, s[1] and not s[2] and not s[3] and s[1] or ''}
