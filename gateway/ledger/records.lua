-- Moves what is due to the records of a usage log, and returns its oldest records. KEYS: the set of unreported requests
-- by the time at which they are due, the log's records, its last number, and the ledger's name. ARGV: the time, the most
-- records to return, a name for a ledger that has none, the number of amounts.
-- Returns the ledger's name, then for each record its number, what it says, its time and its amounts.
local due, records, last, ledger = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local most, amounts = tonumber(ARGV[2]), tonumber(ARGV[4])
redis.call('SETNX', ledger, ARGV[3])
local names = {'what', 'at'}
for amount = 1, amounts do
  names[#names + 1] = tostring(amount)
end
for _, unreported in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', ARGV[1], 'LIMIT', 0, most)) do
  local values = redis.call('HMGET', unreported, unpack(names))
  if values[1] then
    local record = {tostring(redis.call('INCR', last))}
    for i = 1, #names do
      record[#record + 1] = values[i] or '0'
    end
    redis.call('RPUSH', records, cmsgpack.pack(record))
  end
  redis.call('DEL', unreported)
  redis.call('ZREM', due, unreported)
end
local found = {redis.call('GET', ledger)}
for _, record in ipairs(redis.call('LRANGE', records, 0, most - 1)) do
  for _, value in ipairs(cmsgpack.unpack(record)) do
    found[#found + 1] = value
  end
end
return found
