-- Forget segments that another store keeps, all of whose records are below a seq.
-- KEYS: session, segments
-- ARGV: epoch, seq of the first record to keep
-- Returns the names of the segments, after 'ok', or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
local upto = string.format('%.0f', math.max(tonumber(ARGV[2]) - 1, 0))
local names = {'ok'}
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', upto)) do
  names[#names + 1] = entry[2][2]
  redis.call('XDEL', KEYS[2], entry[1])
  redis.call('HSET', KEYS[1], 'b', string.match(entry[1], '^%d+'))
end
return names
