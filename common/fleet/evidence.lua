-- Adds one subject's tags to the evidence of prefixes, and decides whether the prefixes are shared from now on.
--
-- KEYS[1]: root of all keys, with the hash tag that keeps them in one slot of a cluster.
-- ARGV: rules (text), k, factor after a demotion, lifetime of a tag in ms, age of the evidence in ms, then for each
-- prefix: name, tag, "1" if the group knows of a demotion, else "0".
-- Returns the number of prefixes that have become shared, or an error if the fleet has other rules.
local root = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local k, factor, window, age = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local rules = redis.call('GET', root .. ':rules')
if rules and rules ~= ARGV[1] then
    return redis.error_reply('RULES ' .. rules)
end
redis.call('SET', root .. ':rules', ARGV[1], 'PX', window)
if age >= window then
    return 0
end

local decided = 0
for i = 6, #ARGV, 3 do
    local name, tag, is_demoted = ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1'
    local evidence, generation, shared = root .. ':e:' .. name, root .. ':g:' .. name, root .. ':s:' .. name
    if is_demoted then
        redis.call('SET', generation, '1', 'PX', 1000 * window)
    else
        is_demoted = redis.call('EXISTS', generation) == 1
    end
    redis.call('ZREMRANGEBYSCORE', evidence, '-inf', now)
    -- GT: repeated evidence of one subject counts once, by its latest computation.
    redis.call('ZADD', evidence, 'GT', now + window - age, tag)
    redis.call('PEXPIRE', evidence, window)
    if redis.call('ZCARD', evidence) >= k * (is_demoted and factor or 1) then
        if not redis.call('SET', shared, '1', 'PX', window, 'NX') then
            redis.call('PEXPIRE', shared, window, 'GT')
        else
            decided = decided + 1
        end
    end
end
return decided
