#!/bin/bash
# Keeps the newest backups of a folder.

. "$(dirname "$0")/lib/backups.sh"

usage() {
    echo "usage: rotate.sh FOLDER KEEP" >&2
    exit 2
}

[ $# -eq 2 ] || usage
case $2 in '' | *[!0-9]*) usage ;; esac
[ -d "$1" ] || usage
cd -- "$1" || exit 2

backups
removed=0
for name in "${found[@]:$2}"; do
    rm -f -- "./$name" || exit 1
    removed=$((removed + 1))
done
echo "removed $removed"
