-- Replaces one field of a hash if it has the expected value. KEYS[1]: the hash. ARGV[1]: the field; ARGV[2], ARGV[3]: the
-- expected and the new value, each "=VALUE", or empty for none. Returns 1 if it had the value, otherwise 0.
local found = redis.call('HGET', KEYS[1], ARGV[1])
if (found and '=' .. found or '') ~= ARGV[2] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], string.sub(ARGV[3], 2))
end
return 1
