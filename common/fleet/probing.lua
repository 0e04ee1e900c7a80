-- Takes one group's parts of windows that have closed, and returns the sums over all groups.
--
-- KEYS[1]: root of all keys. ARGV: id of the group, length of an epoch in ms, then for each window: name, number of
-- hits, number of marks, marks (subjects, or continuations that one subject has tried).
-- A group's last two parts are kept in a field of the hash `w:NAME`. Parts of the last one and a half epochs are the
-- sum's current window, those of the epoch before its previous one, as groups' epochs begin at different times.
-- Returns for each window: hits, distinct marks, previous hits, previous distinct marks.
local root, group, epoch = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function count(parts)
    local hits, marks, distinct = 0, {}, 0
    for _, part in ipairs(parts) do
        hits = hits + part.hits
        for _, mark in ipairs(part.marks) do
            if not marks[mark] then
                marks[mark], distinct = true, distinct + 1
            end
        end
    end
    return hits, distinct
end

local sums, at = {}, 3
while at <= #ARGV do
    local key, hits, length = root .. ':w:' .. ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    local marks = {}
    for index = at + 3, at + 2 + length do
        marks[#marks + 1] = ARGV[index]
    end
    at = at + 3 + length

    local kept = {{time = now, hits = hits, marks = marks}}
    local before = redis.call('HGET', key, group)
    for _, part in ipairs(before and cmsgpack.unpack(before) or {}) do
        -- A part that is sent again replaces the first one.
        if #kept < 2 and now - part.time > epoch / 2 then
            kept[#kept + 1] = part
        end
    end
    redis.call('HSET', key, group, cmsgpack.pack(kept))
    redis.call('PEXPIRE', key, 3 * epoch)

    local current, previous = {}, {}
    local all = redis.call('HGETALL', key)
    for index = 1, #all, 2 do
        local is_old = true
        for place, part in ipairs(cmsgpack.unpack(all[index + 1])) do
            local age = now - part.time
            if place == 1 and age < 1.5 * epoch then
                current[#current + 1] = part
            elseif age < 2.5 * epoch then
                previous[#previous + 1] = part
            end
            is_old = is_old and age >= 2.5 * epoch
        end
        if is_old then
            redis.call('HDEL', key, all[index])
        end
    end
    local current_hits, current_marks = count(current)
    local previous_hits, previous_marks = count(previous)
    for _, value in ipairs({current_hits, current_marks, previous_hits, previous_marks}) do
        sums[#sums + 1] = value
    end
end
return sums
