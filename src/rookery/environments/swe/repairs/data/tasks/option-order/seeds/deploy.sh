#!/bin/bash
# Prints the plan of a deployment.

here=$(dirname "$0")
. "$here/lib/options.sh"
. "$here/lib/plan.sh"

parse "$@"
plan
