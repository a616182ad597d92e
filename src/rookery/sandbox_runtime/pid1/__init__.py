"""Pid 1 of a sandbox: starts, reaps and kills the commands of the sandbox until its owner disconnects."""
