-- Make one blob young again, and bring it back from quarantine.
-- KEYS: blob, ages, quarantine
-- ARGV: name
-- Returns whether it exists.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] .. '.' .. string.format('%06d', time[2]), ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
