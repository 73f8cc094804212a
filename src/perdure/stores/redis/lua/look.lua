-- Say what a session is, and where its log begins and ends.
-- KEYS: session, log
-- Returns {epoch, head, deleted, base, moved, first entry's id, last entry's id, last entry's epoch}.
local s = redis.call('HMGET', KEYS[1], 'e', 'h', 'd', 'b', 'x')
local first = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {
  s[1], s[2], s[3], s[4], s[5], first and first[1] or false, last and last[1] or false,
  last and last[2][1] or false,
}
