-- Write documents, drop those that are no longer listed, and replace the manifest: one step.
-- KEYS: session, documents
-- ARGV: epoch, seq that it is as of, manifest, what a listing shows, how many documents follow,
--       name and bytes of each, then the names of all that are listed
-- A listing shows what saves have said, unless the fold is as of the log's end.
-- Returns {'ok', whether it shows this now, what it showed before}, {'lost', epoch, deleted}, or {'gone', head} of a server that went back.
local s = redis.call('HMGET', KEYS[1], 'e', 'd', 'h', 't', 'a')
if s[1] ~= ARGV[1] or s[2] == '1' then
  return {'lost', tonumber(s[1] or 0), s[2] == '1' and 1 or 0}
end
local head = tonumber(s[3] or 0)
if tonumber(ARGV[2]) > head then return {'gone', head} end
local place = 6
for _ = 1, tonumber(ARGV[5]) do
  redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1])
  place = place + 2
end
local listed = {}
for at = place, #ARGV do listed[ARGV[at]] = true end
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not listed[name] then redis.call('HDEL', KEYS[2], name) end
end
redis.call('HSET', KEYS[1], 'm', ARGV[3])
if s[4] and tonumber(ARGV[2]) < head then return {'ok', 0, false} end
redis.call('HSET', KEYS[1], 'a', ARGV[4])
redis.call('HDEL', KEYS[1], 't')
return {'ok', 1, s[5]}
