-- Adds entries to the ledger. KEYS: for each entry, its request, its hour and its day.
-- ARGV: the lifetimes of requests and of sums in seconds, then for each entry: the fields of its hour's hash (subject
-- and model), of its day's hash (tenant; tenant and subject), its time's keys, and its four amounts.
-- Returns the increases, four for each entry.
local request_life, sum_life = ARGV[1], ARGV[2]
local increases = {}
local at = 3
for i = 1, #KEYS, 3 do
  local request, hour_key, day_key = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local field, tenant, subject = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local known = redis.call('HMGET', request, '1', '2', '3', '4', 'hour', 'day')
  if known[5] then
    hour_key, day_key = known[5], known[6]
  end
  local is_news = tonumber(ARGV[at + 6]) >= tonumber(known[4] or 0)
  for amount = 1, 4 do
    local change = 0
    if is_news then
      change = tonumber(ARGV[at + 2 + amount]) - tonumber(known[amount] or 0)
    end
    increases[#increases + 1] = change
    if change ~= 0 then
      redis.call('HSET', request, tostring(amount), ARGV[at + 2 + amount], 'hour', hour_key, 'day', day_key)
      redis.call('HINCRBY', hour_key, field .. '\n' .. amount, change)
      if amount == 2 or amount == 4 then
        redis.call('HINCRBY', day_key, tenant, change)
        redis.call('HINCRBY', day_key, subject, change)
      end
    end
  end
  redis.call('EXPIRE', request, request_life)
  redis.call('EXPIRE', hour_key, sum_life)
  redis.call('EXPIRE', day_key, sum_life)
  at = at + 7
end
return increases
