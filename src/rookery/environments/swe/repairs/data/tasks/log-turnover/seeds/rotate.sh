#!/bin/bash
# Puts a log aside; the collector goes on in a new one.

[ $# -eq 2 ] || {
    echo "usage: rotate.sh LOG PIDFILE" >&2
    exit 2
}
log=$1
[ -e "$log" ] || exit 0

for number in 3 2; do
    [ ! -e "$log.$((number - 1))" ] || mv -f -- "$log.$((number - 1))" "$log.$number"
done
mv -f -- "$log" "$log.1"
[ ! -e "$2" ] || kill -HUP "$(cat -- "$2")"
