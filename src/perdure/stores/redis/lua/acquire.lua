-- Take a session with the next epoch if the terms allow it, append the epoch record, and read what a
-- restore needs: one step.
-- What an unpublished draft has goes first, but for its inbox. A draft looks deleted; its 'x' is no
-- number, so that a release that knows no drafts takes it for damaged rather than continues it.
-- KEYS: session, log, documents, dead letters, inbox order
-- ARGV: owner, key as JSON, now, payload, seed; of a new log: the seq of its first record, payload,
--       what it is a draft of or ''; of the terms: create, new, given, after or '';
--       bytes of the log to read at most, what listings show of a new session or '', '*' for all
--       documents or '', then their names
-- Returns {'ok', epoch, head, whether a log begins, how many items wait,
-- manifest, {name, bytes, ...}, last seq before the log, entries since the manifest or nil if they are
-- many, what listings show}, {'held', epoch, owner, released, deleted, draft, what listings
-- show} or {'damaged', head, last entry's id}.

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

local s = redis.call('HMGET', KEYS[1], 'e', 'o', 'r', 'd', 'p', 'h', 'b', 'x', 'm', 'a')
local epoch, owner, released, deleted = tonumber(s[1] or 0), s[2], s[3], s[4]
if not epoch or (s[1] and not owner) then return {'damaged', 0, 'session'} end

-- The rules of Terms.allows, but for what the holder's own hash says: the caller looks there.
local is_there = s[1] and not deleted
local function allowed()
  if is_there and (ARGV[10] == '1' or ARGV[8] ~= '') then return false end
  if ARGV[12] ~= '' then return epoch == tonumber(ARGV[12]) end
  if not is_there and ARGV[9] ~= '1' then return false end
  if not s[1] or deleted == '1' then return true end
  if released then return epoch ~= tonumber(ARGV[11]) end
  return owner == ARGV[1]
end
if not allowed() then return {'held', s[1], owner, released, deleted, s[5], s[10]} end

local is_draft = deleted == 'draft'
if is_draft then
  redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
  redis.call('HDEL', KEYS[1], 'h', 'b', 'x', 'm', 'a', 't', 'c', 'u', 'p')
  s[6], s[7], s[8], s[9], s[10] = false, false, false, false, false
end
local head, base, moved = tonumber(s[6] or 0), tonumber(s[7] or 0), tonumber(s[8] or 0)
if not head or not base or not moved then return {'damaged', 0, 'session'} end

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

local payload = ARGV[4]
if not is_there then
  payload, head = ARGV[7], tonumber(ARGV[6]) - 1
end
epoch, head = epoch + 1, head + 1
local at = string.format('%.0f', head)
local of = string.format('%.0f', epoch)
local line = '{"n":' .. at .. ',"e":' .. of .. ',"k":"epoch","end":true,"r":' .. payload
line = line .. ',"c":"' .. crc32(line, tonumber(ARGV[5])) .. '"}\n'
redis.call('XADD', KEYS[2], at .. '-' .. at, of, line)
redis.call('HSET', KEYS[1], 'e', of, 'h', at, 'o', ARGV[1], 'k', ARGV[2])
redis.call('HSETNX', KEYS[1], 'c', ARGV[3])
redis.call('HSETNX', KEYS[1], 'u', ARGV[3])
if not is_there and ARGV[14] ~= '' then
  redis.call('HSET', KEYS[1], 'a', ARGV[14], 't', 0)
  s[10] = ARGV[14]
end
redis.call('HDEL', KEYS[1], 'r', 'd')
if not is_there and head > 1 then
  base = head - 1
  redis.call('HSET', KEYS[1], 'b', string.format('%.0f', base))
end
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'd', 'draft', 'x', 'draft', 'p', ARGV[8])
end

local documents = {}
if ARGV[15] == '*' then documents = redis.call('HGETALL', KEYS[3]) end
for place = 16, #ARGV do
  local data = redis.call('HGET', KEYS[3], ARGV[place])
  if data then
    documents[#documents + 1] = ARGV[place]
    documents[#documents + 1] = data
  end
end
-- The manifest's number is a hint, as it is not verified here.
local from = string.format('%.0f', 1 + (string.match(s[9] or '', '"as_of_seq":(%d+)') or 0))
local entries, bytes = {}, 0
repeat
  local part = redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', 64)
  for _, entry in ipairs(part) do
    entries[#entries + 1] = entry
    bytes = bytes + #entry[2][2]
  end
  if #part > 0 then from = '(' .. part[#part][1] end
until #part < 64 or bytes > tonumber(ARGV[13])
if bytes > tonumber(ARGV[13]) then entries = false end
return {
  'ok', epoch, head, is_there and 0 or 1, redis.call('ZCARD', KEYS[5]), s[9],
  documents, base, entries, s[10],
}
