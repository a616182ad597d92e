#!/bin/sh
# The sales of each region.
exec awk -f "$(dirname "$0")/report.awk" "$1"
