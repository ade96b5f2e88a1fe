#!/bin/sh
# idle.sh COMMAND ARGUMENT..: runs it on what all others leave of the processors. Linux shares a processor between sessions
# before it looks at what is in them (sched(7), "The autogroup feature"): an idle class alone took turns, as an equal, with
# each server that a test had started in a session of its own.
set -eu
setsid sh -c '
	{ echo 19 >/proc/self/autogroup; } 2>/dev/null || true
	if chrt --idle 0 true 2>/dev/null; then exec chrt --idle 0 "$@"; fi
	exec nice -n 19 "$@"
' idle "$@" &
session=$!
# A terminal interrupts no other session than its own.
trap 'kill -TERM "-$session"' INT TERM HUP
wait "$session"
