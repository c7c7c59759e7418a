#!/bin/sh
# usage: secrets.sh FOLDER   makes the secrets of a cluster, once: what is there already stays as it is.
#
#   ray.token      what each Ray node and client shows (RAY_AUTH_TOKEN_PATH)
#   redis.front    password of the buffer's user in Redis
#   redis.reader   password of the user for tools
#   users.acl      the users of Redis, with hashes of those passwords
#
# The folder is closed. The files in it are readable, so that a container's own user can read what is mounted.
set -eu
umask 077
folder=$1
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
for name in ray.token redis.front redis.reader; do
    [ -s "$name" ] || random > "$name"
done
hash_of() { sha256sum < "$1" | cut -d' ' -f1; }

# The rights are those of docs/buffer.md#use-your-own-redis, for the jobs of all names. `probe` may ask whether the server answers.
cat > users.acl <<EOF
user default off
user areal-front on #$(hash_of redis.front) resetchannels resetkeys ~areal:{*}:* -@all +hget +hmget +hgetall +hexists +ping +time +info +hset +hdel +unlink +set +mget +exists +sadd +srem +smembers +evalsha +script|load +config|get +select
user areal-reader on #$(hash_of redis.reader) resetchannels resetkeys %R~areal:{*}:* -@all +hget +hmget +hgetall +hexists +ping +time +info +multi +exec +mget +hlen +hkeys +hscan +hstrlen +exists +type +select
user probe on nopass resetchannels resetkeys -@all +ping
EOF
chmod 444 ray.token redis.front redis.reader users.acl
