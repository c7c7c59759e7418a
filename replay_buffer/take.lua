-- A new front takes a job over.
--
-- KEYS[1]  the meta hash
-- ARGV     the schema and the state to begin with where there is none; a name that tells this front from others
-- Returns  the new front's epoch, and the revision found.
--
-- The first command changes nothing: a script that has begun to write may go on at the memory limit, and the
-- front that then comes is the one that frees memory.
redis.call('HDEL', KEYS[1], '')
local epoch = redis.call('HINCRBY', KEYS[1], 'front', 1)
redis.call('HSETNX', KEYS[1], 'revision', 0)
redis.call('HSET', KEYS[1], 'owner', ARGV[3])
if redis.call('HEXISTS', KEYS[1], 'state') == 0 then
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'state', ARGV[2], 'revision', 1)
end
return {epoch, redis.call('HGET', KEYS[1], 'revision')}
