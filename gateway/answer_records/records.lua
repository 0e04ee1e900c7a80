-- Records of answers of all gateways together; memory_records.py follows the same rules for a single gateway.
--
-- ARGV[1]: the operation. ARGV[2]: prefix of all keys, with a hash tag that keeps them in one slot of a cluster.
--   ARGV[3]: prefix of the keys that living gateways renew. ARGV[4]: lifetime of records in milliseconds.
--   ARGV[5]: room in bytes.
-- <prefix>:item:<name>    hash: request, owner ("<gateway>:<number>", or empty), end, charged, claim, background, left
--   (bytes of its room that are free), touched (when its time was last prolonged, in milliseconds)
-- <prefix>:chunks:<name>  list
-- <prefix>:claim:<claim>  name of a record
-- <prefix>:expiring       sorted set of names by the time of their expiry, in milliseconds
-- <prefix>:sizes          hash: name -> "<bytes>:<tenant>:<subject>", the latter two hashed
-- <prefix>:used           hash: "all", "<tenant>", "<tenant>:<subject>" -> bytes
-- <prefix>:background     set of the names of open records in the background

local operation, prefix, alive = ARGV[1], ARGV[2], ARGV[3]
local lifetime_ms, room = tonumber(ARGV[4]), tonumber(ARGV[5])
local expiring, sizes, used, background =
  prefix .. ':expiring', prefix .. ':sizes', prefix .. ':used', prefix .. ':background'
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
-- See SHARE in common/room.py.
local SHARE = 3
-- Bytes of room that a record takes at a time.
local BLOCK = 4096

local function item(name)
  return prefix .. ':item:' .. name
end

local function chunks(name)
  return prefix .. ':chunks:' .. name
end

local function add_used(tenant, subject, bytes)
  for _, field in ipairs({'all', tenant, tenant .. ':' .. subject}) do
    if redis.call('HINCRBY', used, field, bytes) <= 0 then
      redis.call('HDEL', used, field)
    end
  end
end

local function drop(name)
  local bytes, tenant, subject = string.match(redis.call('HGET', sizes, name) or '', '^(%d+):(.*):(.*)$')
  if bytes then
    add_used(tenant, subject, -tonumber(bytes))
  end
  local claim = redis.call('HGET', item(name), 'claim')
  if claim and claim ~= '' and redis.call('GET', prefix .. ':claim:' .. claim) == name then
    redis.call('DEL', prefix .. ':claim:' .. claim)
  end
  redis.call('UNLINK', item(name), chunks(name))
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', expiring, name)
  redis.call('SREM', background, name)
end

-- Keys expire a little later than the record, which is then dropped with its counts by the next `open`.
local function touch(name)
  redis.call('ZADD', expiring, now_ms + lifetime_ms, name)
  redis.call('HSET', item(name), 'touched', now_ms)
  local claim = redis.call('HGET', item(name), 'claim')
  local keys = {item(name), chunks(name)}
  if claim and claim ~= '' then
    table.insert(keys, prefix .. ':claim:' .. claim)
  end
  for _, key in ipairs(keys) do
    redis.call('PEXPIRE', key, lifetime_ms + 60000)
  end
end

-- Takes room by the rule of common/room.py; returns whether there was enough.
local function take_room(name, tenant, subject, bytes)
  local found = redis.call('HMGET', used, 'all', tenant, tenant .. ':' .. subject)
  local all, of_tenant, own = tonumber(found[1]) or 0, tonumber(found[2]) or 0, tonumber(found[3]) or 0
  local left = room - all - bytes
  local tenant_left = SHARE * left - of_tenant - bytes
  if left < 0 or (of_tenant > 0 and tenant_left < 0) or (own > 0 and tenant_left - own - bytes < 0) then
    return false
  end
  add_used(tenant, subject, bytes)
  local before = tonumber(string.match(redis.call('HGET', sizes, name) or '', '^(%d+)')) or 0
  redis.call('HSET', sizes, name, (before + bytes) .. ':' .. tenant .. ':' .. subject)
  return true
end

local function is_alive(owner)
  local gateway = string.match(owner, '^(.*):')
  return gateway and redis.call('EXISTS', alive .. gateway) == 1
end

local function exists(name)
  local expires = redis.call('ZSCORE', expiring, name)
  return expires and tonumber(expires) > now_ms and redis.call('EXISTS', item(name)) == 1
end

-- ARGV: name, claim or empty, tenant, subject, bytes of the record, request, owner, 1 if in the background.
-- Returns the name of the record with the same claim, '' if the record was created, 'full' if there is no room.
local function open()
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', expiring, '-inf', now_ms, 'LIMIT', 0, 100)) do
    drop(old)
  end
  local name, claim, tenant, subject, bytes = ARGV[6], ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10])
  if claim ~= '' then
    local holder = redis.call('GET', prefix .. ':claim:' .. claim)
    if holder and exists(holder) then
      return holder
    end
  end
  if not take_room(name, tenant, subject, bytes) then
    return 'full'
  end
  redis.call('HSET', item(name), 'request', ARGV[11], 'owner', ARGV[12], 'claim', claim, 'background', ARGV[13])
  if claim ~= '' then
    redis.call('SET', prefix .. ':claim:' .. claim, name)
  end
  if ARGV[13] == '1' then
    redis.call('SADD', background, name)
  end
  touch(name)
  return ''
end

-- ARGV: for each record "<name> <owner> <number of the first chunk> <number of chunks>", then the chunks.
-- Returns a letter for each record: d (done), l (lost) or g (gone). Repeated chunks are not added again.
-- This runs for every token, so room is taken in blocks, and times are prolonged rarely.
local function append()
  local outcomes, at = {}, 6
  while at <= #ARGV do
    local name, owner, first, count = string.match(ARGV[at], '^(%S+) (%S+) (%d+) (%d+)$')
    first, count = tonumber(first), tonumber(count)
    local key, outcome = item(name), 'd'
    local found = redis.call('HMGET', key, 'owner', 'end', 'left', 'touched')
    local length = redis.call('LLEN', chunks(name))
    if not found[1] or length < first then
      outcome = 'g'
    elseif found[1] ~= owner or found[2] then
      outcome = 'l'
    elseif length < first + count then
      local bytes, new = 0, {}
      for number = length - first + 1, count do
        bytes = bytes + #ARGV[at + number]
        table.insert(new, ARGV[at + number])
      end
      local lacking = bytes - (tonumber(found[3]) or 0)
      if lacking > 0 then
        lacking = math.max(lacking, BLOCK)
        local _, tenant, subject = string.match(redis.call('HGET', sizes, name) or '', '^(%d+):(.*):(.*)$')
        if not tenant or not take_room(name, tenant, subject, lacking) then
          drop(name)
          outcome = 'g'
        end
      else
        lacking = 0
      end
      if outcome == 'd' then
        redis.call('RPUSH', chunks(name), unpack(new))
        redis.call('HINCRBY', key, 'left', lacking - bytes)
        if length == 0 or tonumber(found[4]) < now_ms - lifetime_ms / 4 then
          touch(name)
        end
      end
    end
    table.insert(outcomes, outcome)
    at = at + 1 + count
  end
  return table.concat(outcomes)
end

-- ARGV: name. Returns the request; nil if unknown.
local function request()
  local name = ARGV[6]
  return exists(name) and redis.call('HGET', item(name), 'request') or nil
end

-- ARGV: name, first chunk. Returns owner, end, charged, 1 if the owner is alive, number of chunks, the chunks; nil if unknown.
local function read()
  local name = ARGV[6]
  if not exists(name) then
    return nil
  end
  local found = redis.call('HMGET', item(name), 'owner', 'end', 'charged')
  local written = redis.call('LLEN', chunks(name))
  local list = redis.call('LRANGE', chunks(name), ARGV[7], -1)
  return {found[1], found[2] or '', found[3] or '', is_alive(found[1]) and 1 or 0, written, list}
end

-- ARGV: name, owner or empty (any), end.
local function finish()
  local name = ARGV[6]
  local found = redis.call('HMGET', item(name), 'owner', 'end')
  if not found[1] or found[2] or (ARGV[7] ~= '' and ARGV[7] ~= found[1]) then
    return 0
  end
  redis.call('HSET', item(name), 'end', ARGV[8])
  redis.call('SREM', background, name)
  touch(name)
  return 1
end

-- ARGV: name, owner, tokens charged or empty (as before). Returns 1 if the owner owned it.
local function release()
  local name = ARGV[6]
  if redis.call('HGET', item(name), 'owner') ~= ARGV[7] then
    return 0
  end
  redis.call('HSET', item(name), 'owner', '')
  if ARGV[8] ~= '' then
    redis.call('HSET', item(name), 'charged', ARGV[8])
  end
  touch(name)
  return 1
end

-- ARGV: name, previous owner or empty, new owner, number of chunks.
local function take()
  local name = ARGV[6]
  local found = redis.call('HMGET', item(name), 'owner', 'end')
  local is_same = found[1] == ARGV[7] and not found[2] and redis.call('LLEN', chunks(name)) == tonumber(ARGV[9])
  if not is_same or not exists(name) then
    return 0
  end
  redis.call('HSET', item(name), 'owner', ARGV[8])
  touch(name)
  return 1
end

local function orphans()
  local found = {}
  for _, name in ipairs(redis.call('SMEMBERS', background)) do
    if not exists(name) then
      redis.call('SREM', background, name)
    elseif not is_alive(redis.call('HGET', item(name), 'owner')) then
      table.insert(found, name)
    end
  end
  return found
end

if operation == 'open' then
  return open()
elseif operation == 'append' then
  return append()
elseif operation == 'request' then
  return request()
elseif operation == 'read' then
  return read()
elseif operation == 'finish' then
  return finish()
elseif operation == 'release' then
  return release()
elseif operation == 'take' then
  return take()
elseif operation == 'orphans' then
  return orphans()
elseif operation == 'keep' then
  for at = 6, #ARGV do
    if redis.call('EXISTS', item(ARGV[at])) == 1 then
      touch(ARGV[at])
    end
  end
elseif operation == 'drop' then
  drop(ARGV[6])
end
