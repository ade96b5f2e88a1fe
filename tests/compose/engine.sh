#!/bin/sh
# Runs a command with a Docker engine that answers, and a compose: Debian's are installed where there are none. An engine
# that nobody had started is started, and stopped when the command has ended. Fails when none answers.
#
#   tests/compose/engine.sh make test-containers
#
# DOCKERD_FLAGS: of an engine that is started here, as `--data-root FOLDER`.
set -eu
run=""
[ "$(id -u)" = 0 ] || run=sudo
PATH=$PATH:/usr/sbin:/sbin # where Debian has dockerd and iptables
missing=""
command -v docker >/dev/null && command -v dockerd >/dev/null || missing="$missing docker.io"
docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || missing="$missing docker-compose"
if [ -n "$missing" ]; then
    echo "installing$missing"
    $run apt-get update -q
    # shellcheck disable=SC2086 # a list of names
    $run env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends iptables $missing
fi
engine=""
stop() {
    [ -z "$engine" ] || { echo "stopping the engine" && $run kill "$engine" && wait "$engine" || true; }
}
trap stop EXIT
if ! docker info >/dev/null 2>&1; then
    echo "starting the engine"
    log=${TMPDIR:-/tmp}/dockerd.log
    # shellcheck disable=SC2086 # a list of flags
    $run setsid dockerd ${DOCKERD_FLAGS:-} >"$log" 2>&1 </dev/null &
    engine=$!
    tries=60
    until docker info >/dev/null 2>&1; do
        tries=$((tries - 1))
        if [ $tries = 0 ] || ! kill -0 "$engine" 2>/dev/null; then
            tail -n 20 "$log" >&2
            echo "the Docker engine does not answer" >&2
            exit 1
        fi
        sleep 1
    done
fi
"$@"
