-- Forget the oldest entries of a log, which another store keeps now as one segment.
-- KEYS: session, log, segments
-- ARGV: epoch, seq of the first record that went, of the last, the segment's name
-- Returns 1, 0 when they are gone already, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if s[1] ~= ARGV[1] or s[2] then
  return {'lost', tonumber(s[1] or 0), s[2] and 1 or 0}
end
local front = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
if not front or string.match(front[1], '%d+$') ~= ARGV[2] then return 0 end
redis.call('XADD', KEYS[3], ARGV[3] .. '-' .. ARGV[2], 'segment', ARGV[4])
redis.call('XTRIM', KEYS[2], 'MINID', string.format('%.0f', tonumber(ARGV[3]) + 1))
redis.call('HSET', KEYS[1], 'x', ARGV[3])
return 1
