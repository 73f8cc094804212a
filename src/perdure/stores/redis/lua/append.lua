-- Append one batch as one entry of the log, under the newest epoch, after the head.
-- KEYS: session, log
-- ARGV: epoch, seq of the first record, of the last, lines, now, owner; for listings: turns and
--       labels, '' for those that are as before
-- Returns 0 when it is there, {'lost', epoch, deleted}, {'overlap', head} or {'gap', head}.
-- Of a server that went back, another process may have got the same epoch.
local s = redis.call('HMGET', KEYS[1], 'e', 'h', 'd', 'o')
if s[1] ~= ARGV[1] or s[3] == '1' or s[4] ~= ARGV[6] then
  return {'lost', tonumber(s[1] or 0), s[3] == '1' and 1 or 0}
end
local function said()
  redis.call('HSET', KEYS[1], 'u', ARGV[5])
  if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 't', ARGV[7]) end
  if ARGV[8] ~= '' then redis.call('HSET', KEYS[1], 'a', ARGV[8]) end
end
local head, first = tonumber(s[2] or 0), tonumber(ARGV[2])
local id = ARGV[3] .. '-' .. ARGV[2]
if first > head + 1 then return {'gap', head} end
if tonumber(ARGV[3]) < first then return 0 end
if first == head + 1 then
  -- A log that is gone is not begun again in its middle.
  if not redis.call('XADD', KEYS[2], 'NOMKSTREAM', id, ARGV[1], ARGV[4]) then
    return {'gap', head}
  end
  redis.call('HSET', KEYS[1], 'h', ARGV[3])
  said()
  return 0
end
-- Sent again. A write all the same, so that WAITAOF on this connection waits for the first one.
said()
local held = redis.call('XRANGE', KEYS[2], id, id)[1]
if held and held[2][1] == ARGV[1] and held[2][2] == ARGV[4] then return 0 end
return {'overlap', head}
