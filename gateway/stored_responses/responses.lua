-- Stored responses of all gateways together; sqlite_responses.py keeps the same bounds for one.
--
-- ARGV[1]: put or delete. ARGV[2]: prefix of all keys, with a hash tag, so that all are in one slot of a cluster.
--   ARGV[3]: the holder, hashed. ARGV[4]: the response's id, hashed.
-- <prefix>:item:<holder>:<id>  hash: user, response, messages, input; expires by itself
-- <prefix>:all, <prefix>:of:<holder>  sorted sets of "<holder>:<id>" by the time of storing, in milliseconds
-- <prefix>:sizes  hash: "<holder>:<id>" -> bytes
-- <prefix>:used   hash: "<holder>", "all" -> bytes

local prefix, holder = ARGV[2], ARGV[3]
local member = holder .. ':' .. ARGV[4]
local all, sizes, totals = prefix .. ':all', prefix .. ':sizes', prefix .. ':used'

local function add(whose, bytes)
  if redis.call('HINCRBY', totals, whose, bytes) <= 0 then
    redis.call('HDEL', totals, whose)
  end
end

local function drop(found)
  local whose = string.match(found, '^[^:]+')
  local bytes = tonumber(redis.call('HGET', sizes, found)) or 0
  redis.call('UNLINK', prefix .. ':item:' .. found)
  redis.call('HDEL', sizes, found)
  redis.call('ZREM', all, found)
  redis.call('ZREM', prefix .. ':of:' .. whose, found)
  add(whose, -bytes)
  add('all', -bytes)
end

local function make_room(set, whose, bytes, limit)
  while (tonumber(redis.call('HGET', totals, whose)) or 0) + bytes > limit do
    local oldest = redis.call('ZRANGE', set, 0, 0)[1]
    if not oldest then
      return
    end
    drop(oldest)
  end
end

-- ARGV: lifetime in milliseconds, bytes for all, bytes for one holder, user ("=NAME", or empty: none), response,
--   messages, input. Done again, it does nothing.
local function put()
  if redis.call('HEXISTS', sizes, member) == 1 then
    return 0
  end
  local lifetime_ms, room, share, user = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
  local time = redis.call('TIME')
  local now_ms = math.floor(time[1] * 1000 + time[2] / 1000)
  local bytes = #ARGV[9] + #ARGV[10] + #ARGV[11]
  -- Items have expired by themselves; the rest of what is known of them follows here.
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', now_ms - lifetime_ms, 'LIMIT', 0, 1000)) do
    drop(old)
  end
  make_room(prefix .. ':of:' .. holder, holder, bytes, share)
  make_room(all, 'all', bytes, room)
  local item = prefix .. ':item:' .. member
  redis.call('HSET', item, 'user', user, 'response', ARGV[9], 'messages', ARGV[10], 'input', ARGV[11])
  redis.call('PEXPIRE', item, lifetime_ms)
  redis.call('ZADD', all, now_ms, member)
  redis.call('ZADD', prefix .. ':of:' .. holder, now_ms, member)
  redis.call('HSET', sizes, member, bytes)
  add(holder, bytes)
  add('all', bytes)
  return 1
end

-- ARGV: user ("=NAME", or empty: any). Returns whether there was such a response.
local function delete()
  local user = redis.call('HGET', prefix .. ':item:' .. member, 'user')
  if not user or (ARGV[5] ~= '' and ARGV[5] ~= user) then
    return 0
  end
  drop(member)
  return 1
end

if ARGV[1] == 'put' then
  return put()
else
  return delete()
end
