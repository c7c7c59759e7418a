-- A front takes a job over: for the first time, or back after it lost Redis.
--
-- KEYS[1]  the meta hash
-- ARGV     the epoch found there, empty for none; the front's epoch from now on; a name that tells it from
--          others; the schema and the state to begin with where there is no ledger
-- Returns  {"taken", the revision found}, or {"moved"} when the epoch is not the one found: of an attempt that
--          arrives late, after another, nothing comes true.
--
-- Nothing but the epoch and its owner is written to a ledger that is there: a take-over that dies between its
-- steps leaves no trace in the revision, and the next one counts the same writes as lost.
local held = redis.call('HMGET', KEYS[1], 'front', 'state')
if (held[1] or '') ~= ARGV[1] then
  return {'moved'}
end
-- This changes nothing, and comes first: a script that has begun to write may go on at the memory limit, and
-- the front that then comes is the one that frees memory.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'front', ARGV[2], 'owner', ARGV[3])
if not held[2] then
  redis.call('HSET', KEYS[1], 'schema', ARGV[4], 'state', ARGV[5], 'revision', 1)
end
return {'taken', redis.call('HGET', KEYS[1], 'revision')}
