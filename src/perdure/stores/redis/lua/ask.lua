-- Leave word for an owner, and tell it if it listens.
-- KEYS: asks
-- ARGV: seconds to keep it, the owner's channel, ask
redis.call('HINCRBY', KEYS[1], ARGV[3], 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2], '1')
return 0
