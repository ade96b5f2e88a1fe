#!/bin/sh
# A Docker engine that answers, and a compose: Debian's are installed where there are none, and the engine is started. Fails
# when neither helps.
set -eu
run=""
[ "$(id -u)" = 0 ] || run=sudo
missing=""
command -v docker >/dev/null || missing="$missing docker.io"
docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || missing="$missing docker-compose"
if [ -n "$missing" ]; then
    echo "installing$missing"
    $run apt-get update -q
    # shellcheck disable=SC2086 # a list of names
    $run env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends iptables $missing
fi
docker info >/dev/null 2>&1 && exit 0
echo "starting the engine"
log=/var/log/dockerd.log
$run sh -c "PATH=\$PATH:/usr/sbin:/sbin setsid nohup dockerd >$log 2>&1 </dev/null &"
for _ in $(seq 60); do
    docker info >/dev/null 2>&1 && exit 0
    sleep 1
done
tail -n 20 "$log" >&2
echo "the Docker engine does not answer" >&2
exit 1
