-- Keep one blob; it grows young again, and comes back from quarantine.
-- KEYS: blob, ages, quarantine
-- ARGV: name, bytes
local time = redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], time[1] .. '.' .. string.format('%06d', time[2]), ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 0
