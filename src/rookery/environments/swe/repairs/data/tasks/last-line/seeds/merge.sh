#!/bin/bash
# Puts files of records together.

. "$(dirname "$0")/lib/records.sh"

for file in "$@"; do
    if [ ! -r "$file" ]; then
        echo "merge.sh: cannot read $file" >&2
        exit 1
    fi
done

count=0
for file in "$@"; do
    records "$file"
done
echo "merged $count records" >&2
