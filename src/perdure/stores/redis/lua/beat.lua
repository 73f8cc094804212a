-- Renew an owner's heartbeat, forget what it has heard, and return what is asked of it.
-- KEYS: owner, asks
-- ARGV: seconds to keep both, then what was heard: ask and count of each
-- Returns the asks with their counts. An answer that is lost is given again next time.
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
for at = 2, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[at]) == ARGV[at + 1] then
    redis.call('HDEL', KEYS[2], ARGV[at])
  end
end
return redis.call('HGETALL', KEYS[2])
