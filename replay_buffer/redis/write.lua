-- The one write of the buffer: all of a decision, or nothing of it.
--
-- KEYS[1]  the meta hash; further keys as the write set names them
-- ARGV     the front's epoch, the revision the decision was made at, the ledger's time, then for each command:
--          its name, the number of its key in KEYS, how many arguments follow, the arguments
-- Returns  {"ok"}, {"fenced", epoch} when a newer front has taken over,
--          {"behind", revision} when the ledger is not at the expected revision, {"gone"}, or
--          {"absent", key} when an EXISTS, all of which come first, finds a key missing.
local meta = KEYS[1]
local held = redis.call('HMGET', meta, 'front', 'revision')
if not (held[1] and held[2]) then
  return {'gone'}
end
if held[1] ~= ARGV[1] then
  return {'fenced', held[1]}
end
if held[2] ~= ARGV[2] then
  return {'behind', held[2]}
end
local i = 4
while i <= #ARGV do
  local last = i + 2 + tonumber(ARGV[i + 2])
  local key = KEYS[tonumber(ARGV[i + 1])]
  local answer = redis.call(ARGV[i], key, unpack(ARGV, i + 3, last))
  if ARGV[i] == 'EXISTS' and answer == 0 then
    return {'absent', key}
  end
  i = last + 1
end
-- Redis' own clock may be set: it only tells readers when this was, and no deadline comes of it.
local time = redis.call('TIME')
local wall_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', meta, 'revision', ARGV[2] + 1, 'alive_ms', ARGV[3], 'wall_ms', wall_ms)
return {'ok'}
