-- Move one unreachable blob out of the way, or remove it if it was moved long enough ago.
-- KEYS: blob, ages, quarantine
-- ARGV: name, the least age in seconds
-- Returns {1, 0} when it was moved, {2, bytes} when it was removed, else {0, 0}.
local time = redis.call('TIME')
local now = tonumber(time[1] .. '.' .. string.format('%06d', time[2]))
local since = redis.call('ZSCORE', KEYS[3], ARGV[1])
local old = now - tonumber(ARGV[2])
if not since then
  local put = redis.call('ZSCORE', KEYS[2], ARGV[1])
  if put and tonumber(put) <= old then
    redis.call('ZADD', KEYS[3], string.format('%.6f', now), ARGV[1])
    return {1, 0}
  end
  return {0, 0}
end
if tonumber(since) > old then return {0, 0} end
local bytes = redis.call('STRLEN', KEYS[1])
redis.call('UNLINK', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return {2, bytes}
