-- Take a session with the next epoch, and append the epoch record: one step.
-- What an unpublished draft has goes first, but for its inbox. A draft looks deleted; its 'x' is no
-- number, so that a release that knows no drafts takes it for damaged rather than goes on with it.
-- KEYS: session, log, documents, dead letters
-- ARGV: epoch that must be the newest, owner, key as JSON, now, payload, seed, and of a new log: the
--       seq of its first record, payload, what it is a draft of or ''
-- Returns {'ok', epoch, head, whether a log begins}, {'held', epoch}, {'exists', epoch} or
-- {'damaged', head, last entry's id}.

-- CRC-32 as zlib.crc32(line, seed); an epoch record is short.
local function crc32(line, seed)
  local crc = bit.bnot(seed)
  for at = 1, #line do
    crc = bit.bxor(crc, string.byte(line, at))
    for _ = 1, 8 do
      local odd = bit.band(crc, 1)
      crc = bit.rshift(crc, 1)
      if odd == 1 then crc = bit.bxor(crc, 0xEDB88320) end
    end
  end
  return bit.tohex(bit.bnot(crc))
end

local s = redis.call('HMGET', KEYS[1], 'e', 'h', 'b', 'x', 'd')
if s[5] == 'draft' and s[1] == ARGV[1] then
  redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
  redis.call('HDEL', KEYS[1], 'h', 'b', 'x', 'm', 'a', 'c', 'u', 'p')
end
if s[5] == 'draft' then s = {s[1], false, false, false, s[5]} end
local epoch, head, base = tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0)
local moved = tonumber(s[4] or 0)
if not epoch or not head or not base or not moved then return {'damaged', 0, 'session'} end
if epoch ~= tonumber(ARGV[1]) then return {'held', epoch} end
local created = epoch == 0 or s[5]
if ARGV[9] ~= '' and not created then return {'exists', epoch} end

-- The log must begin and end where the session says: nothing is built on damage.
local front = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
if front and tonumber(string.match(front[1], '%d+$')) ~= math.max(base, moved) + 1 then
  return {'damaged', head, front[1]}
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if last then
  if tonumber(string.match(last[1], '^%d+')) ~= head or tonumber(last[2][1]) ~= epoch then
    return {'damaged', head, last[1]}
  end
elseif head ~= 0 then
  return {'damaged', head, 'none'}
end

local payload = ARGV[5]
if created then
  payload, head = ARGV[8], tonumber(ARGV[7]) - 1
end
epoch, head = epoch + 1, head + 1
local at = string.format('%.0f', head)
local of = string.format('%.0f', epoch)
local line = '{"n":' .. at .. ',"e":' .. of .. ',"k":"epoch","end":true,"r":' .. payload
line = line .. ',"c":"' .. crc32(line, tonumber(ARGV[6])) .. '"}\n'
redis.call('XADD', KEYS[2], at .. '-' .. at, of, line)
redis.call('HSET', KEYS[1], 'e', of, 'h', at, 'o', ARGV[2], 'k', ARGV[3], 'u', ARGV[4])
redis.call('HSETNX', KEYS[1], 'c', ARGV[4])
redis.call('HDEL', KEYS[1], 'r', 'd')
if created and head > 1 then
  redis.call('HSET', KEYS[1], 'b', string.format('%.0f', head - 1))
end
if ARGV[9] ~= '' then
  redis.call('HSET', KEYS[1], 'd', 'draft', 'x', 'draft', 'p', ARGV[9])
end
return {'ok', epoch, head, created and 1 or 0}
