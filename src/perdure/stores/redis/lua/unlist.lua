-- Take a name out of a sorted set, if its score is still the one that was seen.
-- KEYS: the set
-- ARGV: name, score
if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or -1) == tonumber(ARGV[2]) then
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return 0
