-- Say that the holder writes no more.
-- KEYS: session
-- ARGV: epoch
if redis.call('HGET', KEYS[1], 'e') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'r', '1')
end
return 0
