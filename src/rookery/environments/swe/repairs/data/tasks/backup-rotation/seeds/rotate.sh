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

names=$(backups "$1") || {
    echo "rotate.sh: cannot read $1" >&2
    exit 1
}
removed=0
for name in $(echo "$names" | tail -n +$(($2 + 1))); do
    rm "$1/$name" || exit 1
    removed=$((removed + 1))
done
echo "removed $removed"
