-- Use of limits, counted for all gateways together; memory_meters.py is the same algorithm for a single gateway.
--
-- KEYS: two per account: a hash (requests, tokens: the used amounts that are not refilled yet; requests_at, tokens_at:
--   the times of these amounts, in microseconds; open: the number of requests with a lease), and a sorted set of leases
--   by their expiry. The name of a lease is "<requests>:<unique name>".
-- ARGV[1]: take, continue, inherit, settle or renew. ARGV[2]: the time in microseconds; if empty, this server's time, the
--   only clock that all gateways share. The clock may jump: a jump backwards refills nothing, and leases that expire too
--   early are restored by their renewal.

-- Keys expire this much later than the amounts in them.
local MARGIN_MS = 60000
local MINUTE_US = 60000000

local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function text(number)
  return string.format('%.17g', number)
end

local function requests_of(lease)
  return tonumber(string.match(lease, '^%d+'))
end

local function used(key, kind, per_minute)
  local found = redis.call('HMGET', key, kind, kind .. '_at')
  local amount, at = tonumber(found[1]) or 0, tonumber(found[2]) or now
  return math.max(amount - math.max(now - at, 0) * per_minute / MINUTE_US, 0)
end

local function set_used(key, kind, amount)
  redis.call('HSET', key, kind, text(amount), kind .. '_at', text(now))
end

-- Returns the number of open requests, after removing expired leases, whose gateways have died.
local function open(key, leases)
  local count = tonumber(redis.call('HGET', key, 'open'))
  if not count then
    count = 0
    for _, lease in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
      count = count + requests_of(lease)
    end
  end
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', text(now))) do
    redis.call('ZREM', leases, lease)
    count = count - requests_of(lease)
    redis.call('HSET', key, 'open', count)
  end
  return count
end

local function keep(key, milliseconds)
  milliseconds = math.ceil(milliseconds) + MARGIN_MS
  if redis.call('PTTL', key) < milliseconds then
    redis.call('PEXPIRE', key, milliseconds)
  end
end

-- ARGV: lease, its lifetime in microseconds, requests, tokens; per account: requests per minute, tokens per minute,
--   concurrent requests; 0: no limit.
-- With `continue`, the requests only become open: their numbers per minute are neither checked nor used. With `inherit`,
--   the limit of open requests is not checked either.
-- Returns the number of the account whose limit is reached (0: none), the limit, the wait in seconds; per account the
--   remaining requests and tokens.
local function take()
  local lease, lasts, requests, tokens = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
  local accounts, forbids, limit, wait = {}, 0, '', 0

  local function check(index, bucket_limit, per_minute, amount, left)
    local lacking = math.min(amount, per_minute) - left
    if forbids == 0 and lacking > 0 then
      forbids, limit, wait = index, bucket_limit, lacking * 60 / per_minute
    end
  end

  for index = 1, #KEYS / 2 do
    local account = {
      key = KEYS[2 * index - 1],
      leases = KEYS[2 * index],
      per_minute = {requests = tonumber(ARGV[4 + 3 * index]), tokens = tonumber(ARGV[5 + 3 * index])},
      concurrent = tonumber(ARGV[6 + 3 * index]),
      used = {},
    }
    accounts[index] = account
    account.has_lease = account.concurrent > 0 or account.per_minute.tokens > 0
    account.open = account.has_lease and open(account.key, account.leases) or 0
    if forbids == 0 and account.concurrent > 0 and ARGV[1] ~= 'inherit' then
      -- A batch larger than the limit is allowed when nothing else is open; otherwise it could never run.
      local allowed = account.open == 0 and math.max(account.concurrent, requests) or account.concurrent
      if account.open + requests > allowed then
        forbids, limit = index, 'CONCURRENT'
      end
    end
    for kind, amount in pairs({requests = requests, tokens = tokens}) do
      if account.per_minute[kind] > 0 and ARGV[1] == 'take' then
        account.used[kind] = used(account.key, kind, account.per_minute[kind])
      end
    end
    if account.used.requests then
      check(index, 'REQUESTS', account.per_minute.requests, requests, account.per_minute.requests - account.used.requests)
    end
    if account.used.tokens then
      check(index, 'TOKENS', account.per_minute.tokens, tokens, account.per_minute.tokens - account.used.tokens)
    end
  end

  local answer = {forbids, limit, text(wait)}
  for _, account in ipairs(accounts) do
    if forbids == 0 then
      local lasting_ms = 0
      for kind, amount in pairs({requests = requests, tokens = tokens}) do
        if account.used[kind] then
          account.used[kind] = account.used[kind] + amount
          set_used(account.key, kind, account.used[kind])
          lasting_ms = math.max(lasting_ms, account.used[kind] * 60000 / account.per_minute[kind])
        end
      end
      if account.has_lease then
        redis.call('ZADD', account.leases, text(now + lasts), lease)
        redis.call('HSET', account.key, 'open', account.open + requests)
        lasting_ms = math.max(lasting_ms, lasts / 1000)
        keep(account.leases, lasts / 1000)
      end
      keep(account.key, lasting_ms)
    end
    for _, kind in ipairs({'requests', 'tokens'}) do
      table.insert(answer, account.used[kind] and text(account.per_minute[kind] - account.used[kind]) or '')
    end
  end
  return answer
end

-- ARGV: lease, tokens used in excess of those announced; per account: tokens per minute. Idempotent.
local function settle()
  local lease, tokens = ARGV[3], tonumber(ARGV[4])
  for index = 1, #KEYS / 2 do
    local key, leases, per_minute = KEYS[2 * index - 1], KEYS[2 * index], tonumber(ARGV[4 + index])
    local count = open(key, leases)
    if redis.call('ZREM', leases, lease) == 1 then
      redis.call('HSET', key, 'open', count - requests_of(lease))
      if per_minute > 0 then
        local amount = math.max(used(key, 'tokens', per_minute) + tokens, 0)
        set_used(key, 'tokens', amount)
        keep(key, amount * 60000 / per_minute)
      end
    end
  end
end

-- ARGV: the leases' lifetime in microseconds, leases of the single account in KEYS. Lost leases are restored.
local function renew()
  local key, leases, lasts = KEYS[1], KEYS[2], tonumber(ARGV[3])
  local count = open(key, leases)
  for index = 4, #ARGV do
    if redis.call('ZADD', leases, text(now + lasts), ARGV[index]) == 1 then
      count = count + requests_of(ARGV[index])
    end
  end
  redis.call('HSET', key, 'open', count)
  keep(key, lasts / 1000)
  keep(leases, lasts / 1000)
end

if ARGV[1] == 'take' or ARGV[1] == 'continue' or ARGV[1] == 'inherit' then
  return take()
elseif ARGV[1] == 'settle' then
  return settle()
else
  return renew()
end
