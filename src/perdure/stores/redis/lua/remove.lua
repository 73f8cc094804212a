-- Remove one blob at once.
-- KEYS: blob, ages, quarantine
-- ARGV: name
-- Returns how many bytes it had.
local bytes = redis.call('STRLEN', KEYS[1])
redis.call('UNLINK', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return bytes
