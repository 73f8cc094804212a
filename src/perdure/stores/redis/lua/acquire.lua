-- Take a session with the next epoch, and append the epoch record: one step.
-- KEYS: session, log
-- ARGV: epoch that must be the newest, owner, key as JSON, now, payload, seed
-- Returns {'ok', epoch, head}, {'held', epoch} or {'damaged', head, last entry's id}.

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

local s = redis.call('HMGET', KEYS[1], 'e', 'h', 'b', 'x')
local epoch, head, base = tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0)
local moved = tonumber(s[4] or 0)
if not epoch or not head or not base or not moved then return {'damaged', 0, 'session'} end
if epoch ~= tonumber(ARGV[1]) then return {'held', epoch} end

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

epoch, head = epoch + 1, head + 1
local at = string.format('%.0f', head)
local of = string.format('%.0f', epoch)
local line = '{"n":' .. at .. ',"e":' .. of .. ',"k":"epoch","end":true,"r":' .. ARGV[5]
line = line .. ',"c":"' .. crc32(line, tonumber(ARGV[6])) .. '"}\n'
redis.call('XADD', KEYS[2], at .. '-' .. at, of, line)
redis.call('HSET', KEYS[1], 'e', of, 'h', at, 'o', ARGV[2], 'k', ARGV[3], 'u', ARGV[4])
redis.call('HSETNX', KEYS[1], 'c', ARGV[4])
redis.call('HDEL', KEYS[1], 'r', 'd')
return {'ok', epoch, head}
