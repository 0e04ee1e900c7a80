-- Stored responses of all gateways together; sqlite_responses.py follows the same rule (store.py) for a single gateway.
--
-- ARGV[1]: put or delete. ARGV[2]: prefix of all keys, with a hash tag that keeps them in one slot of a cluster.
--   ARGV[3]: the holder, hashed. ARGV[4]: the response's id, hashed. An entry's name is "<holder>:<id>".
-- <prefix>:item:<entry>  hash: user, response, messages, input; has a time to live
-- <prefix>:entries    hash: entry -> "<bytes>:<tenant>:<subject>", the latter two hashed
-- <prefix>:expiring   sorted set of entries by the time of storing, in milliseconds
-- <prefix>:sequence   number of the latest entry
-- <prefix>:used       hash: "all", "<tenant>", "<tenant>:<subject>" -> bytes
-- <prefix>:of:<tenant>, <prefix>:of:<tenant>:<subject>  sorted sets of their entries by sequence number
-- <prefix>:tenants, <prefix>:subjects:<tenant>  sorted sets of "<number of the oldest entry>:<hash>" by negative bytes:
--   the first one uses most; among equals, it has the oldest entry

local prefix, entry = ARGV[2], ARGV[3] .. ':' .. ARGV[4]
local entries, expiring, used = prefix .. ':entries', prefix .. ':expiring', prefix .. ':used'

-- Returns the index member for a tenant or subject whose entries are in the sorted set `of`; nil if it has none.
local function label(of, name)
  local oldest = redis.call('ZRANGE', of, 0, 0, 'WITHSCORES')[2]
  return oldest and string.format('%016.0f', tonumber(oldest)) .. ':' .. name
end

-- Applies `change` to the entries of a tenant or subject, and updates its member in the index.
local function update(index, of, field, name, bytes, change)
  local before = label(of, name)
  if before then
    redis.call('ZREM', index, before)
  end
  change(of)
  local total = redis.call('HINCRBY', used, field, bytes)
  local after = label(of, name)
  if after then
    redis.call('ZADD', index, -total, after)
  else
    redis.call('HDEL', used, field)
  end
end

local function update_both(tenant, subject, bytes, change)
  local both = tenant .. ':' .. subject
  update(prefix .. ':tenants', prefix .. ':of:' .. tenant, tenant, tenant, bytes, change)
  update(prefix .. ':subjects:' .. tenant, prefix .. ':of:' .. both, both, subject, bytes, change)
  if redis.call('HINCRBY', used, 'all', bytes) == 0 then
    redis.call('HDEL', used, 'all')
  end
end

local function drop(found)
  local bytes, tenant, subject = string.match(redis.call('HGET', entries, found) or '', '^(%d+):(.*):(.*)$')
  if not bytes then
    error('the server has lost keys of stored responses: it should not evict any')
  end
  redis.call('UNLINK', prefix .. ':item:' .. found)
  redis.call('HDEL', entries, found)
  redis.call('ZREM', expiring, found)
  update_both(tenant, subject, -tonumber(bytes), function(of) redis.call('ZREM', of, found) end)
end

local function first(index)
  return string.match(redis.call('ZRANGE', index, 0, 0)[1] or '', ':(.*)$')
end

local function make_room(limit)
  while tonumber(redis.call('HGET', used, 'all')) > limit do
    local tenant = first(prefix .. ':tenants')
    local subject = first(prefix .. ':subjects:' .. tenant)
    drop(redis.call('ZRANGE', prefix .. ':of:' .. tenant .. ':' .. subject, 0, 0)[1])
  end
end

-- ARGV: lifetime in milliseconds, room in bytes, tenant and subject whose room it uses (hashed), bytes, user ("=NAME",
--   or empty: none), response, messages, input. Idempotent.
local function put()
  if redis.call('HEXISTS', entries, entry) == 1 then
    return
  end
  local lifetime_ms, room, tenant, subject, bytes = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]
  local time = redis.call('TIME')
  local now_ms = math.floor(time[1] * 1000 + time[2] / 1000)
  -- Redis has removed expired items; this removes their entries.
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', expiring, '-inf', now_ms - lifetime_ms, 'LIMIT', 0, 1000)) do
    drop(old)
  end
  local item = prefix .. ':item:' .. entry
  redis.call('HSET', item, 'user', ARGV[10], 'response', ARGV[11], 'messages', ARGV[12], 'input', ARGV[13])
  redis.call('PEXPIRE', item, lifetime_ms)
  redis.call('HSET', entries, entry, bytes .. ':' .. tenant .. ':' .. subject)
  redis.call('ZADD', expiring, now_ms, entry)
  local sequence = redis.call('INCR', prefix .. ':sequence')
  update_both(tenant, subject, tonumber(bytes), function(of) redis.call('ZADD', of, sequence, entry) end)
  make_room(room)
end

-- ARGV: user ("=NAME", or empty: any). Returns 1 if the response existed, otherwise 0.
local function delete()
  local user = redis.call('HGET', prefix .. ':item:' .. entry, 'user')
  if not user or (ARGV[5] ~= '' and ARGV[5] ~= user) then
    return 0
  end
  drop(entry)
  return 1
end

if ARGV[1] == 'put' then
  return put()
else
  return delete()
end
