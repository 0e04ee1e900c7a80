-- Adds entries to the ledger. KEYS: for each entry, its request, its hour and its day, its unreported amounts, and last
-- the set of all unreported requests by the time at which they are due.
-- ARGV: the lifetimes of requests and of sums in seconds, the number of amounts, whether there is a usage log (0 or 1),
-- then for each entry: the fields of its hour's hash (subject and work), of its day's hash (tenant; tenant and subject),
-- what a record says of it, its time, the time at which it is due without an end, whether it has ended (0 or 1), and its
-- amounts in JSON. Returns the increases in JSON, as many for each entry as there are amounts: clients read and write one
-- text faster than many numbers.
local request_life, sum_life, amounts, has_log = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local due = KEYS[#KEYS]
-- Of the amounts: tokens of prompts and of output, which budgets count.
local prompt, output = 2, 4
local names = {}
for amount = 1, amounts do
  names[amount] = tostring(amount)
end
local increases = {}
local at = 5
for i = 1, #KEYS - 1, 4 do
  local request, hour_key, day_key, unreported = KEYS[i], KEYS[i + 1], KEYS[i + 2], KEYS[i + 3]
  local field, tenant, subject, what = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local time, due_at, has_ended = ARGV[at + 4], ARGV[at + 5], ARGV[at + 6] == '1'
  local values = cjson.decode(ARGV[at + 7])
  local known = redis.call('HMGET', request, unpack(names))
  local places = redis.call('HMGET', request, 'use', 'day')
  hour_key, day_key = places[1] or hour_key, places[2] or day_key
  local is_news = values[output] >= tonumber(known[output] or 0)
  local changed = {}
  for amount = 1, amounts do
    local change = 0
    if is_news then
      change = values[amount] - tonumber(known[amount] or 0)
    end
    increases[#increases + 1] = change
    if change ~= 0 then
      changed[#changed + 1] = names[amount]
      changed[#changed + 1] = string.format('%.0f', values[amount])
      redis.call('HINCRBY', hour_key, field .. '\n' .. amount, change)
      if amount == prompt or amount == output then
        redis.call('HINCRBY', day_key, tenant, change)
        redis.call('HINCRBY', day_key, subject, change)
      end
      if has_log then
        redis.call('HINCRBY', unreported, names[amount], change)
      end
    end
  end
  if #changed > 0 then
    redis.call('HSET', request, 'use', hour_key, 'day', day_key, unpack(changed))
  end
  if has_log then
    if #changed > 0 then
      redis.call('HSETNX', unreported, 'what', what)
      redis.call('HSETNX', unreported, 'at', time)
      redis.call('ZADD', due, 'NX', due_at, unreported)
    end
    if has_ended then
      redis.call('ZADD', due, 'XX', 0, unreported)
    end
  end
  redis.call('EXPIRE', request, request_life)
  redis.call('EXPIRE', hour_key, sum_life)
  redis.call('EXPIRE', day_key, sum_life)
  at = at + 8
end
return cjson.encode(increases)
