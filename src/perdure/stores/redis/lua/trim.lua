-- Remove the oldest entries of a log, a bounded number of them, and never the last one.
-- KEYS: session, log
-- ARGV: epoch, seq of the first record to keep, how many entries at most
-- Returns {entries removed, their bytes}, or {'lost', epoch, deleted}.
local s = redis.call('HMGET', KEYS[1], 'e', 'd', 'h')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
local below = math.min(tonumber(ARGV[2]), tonumber(s[3] or 0))
local entries = redis.call(
  'XRANGE', KEYS[2], '-', string.format('%.0f', math.max(below - 1, 0)), 'COUNT', ARGV[3])
local bytes = 0
for _, entry in ipairs(entries) do bytes = bytes + #entry[2][2] end
if #entries > 0 then
  local last = entries[#entries][1]
  for _, entry in ipairs(entries) do redis.call('XDEL', KEYS[2], entry[1]) end
  redis.call('HSET', KEYS[1], 'b', string.match(last, '^%d+'))
end
return {#entries, bytes}
