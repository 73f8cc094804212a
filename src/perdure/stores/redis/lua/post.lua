-- Leave items for a session, after those that wait; an id that waits is not posted again.
-- KEYS: session, inbox items, inbox order
-- ARGV: how many items and bytes may wait (-1: no limit), then id and bytes of each item
-- Returns {how many are new, the holder or '', waiting, their bytes, the new ones' bytes}; nothing
-- was posted unless waiting is -1.
local new, added, parts, seen = 0, 0, {}, {}
for at = 3, #ARGV, 2 do
  local id = ARGV[at]
  if not seen[id] and not redis.call('ZSCORE', KEYS[3], id) then
    new, added, seen[id] = new + 1, added + #ARGV[at + 1], true
    parts[new] = at
  end
end
local most, room = tonumber(ARGV[1]), tonumber(ARGV[2])
if new > 0 and most >= 0 then
  local ids = redis.call('ZRANGE', KEYS[3], 0, -1)
  local size = 0
  for at = 1, #ids do
    size = size + redis.call('HSTRLEN', KEYS[2], ids[at])
  end
  if #ids + new > most or size + added > room then
    return {new, '', #ids, size, added}
  end
end
local newest = redis.call('ZREVRANGE', KEYS[3], 0, 0, 'WITHSCORES')
local place = tonumber(newest[2] or 0)
for number = 1, new do
  local at = parts[number]
  place = place + 1
  redis.call('ZADD', KEYS[3], string.format('%.0f', place), ARGV[at])
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
end
local s = redis.call('HMGET', KEYS[1], 'o', 'r', 'd')
return {new, s[1] and not s[2] and not s[3] and s[1] or '', -1, 0, 0}
