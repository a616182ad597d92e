"""Sandboxes on this machine, made by its own kernel: no daemon, no image needed, milliseconds.

A keeper process forks each box out of itself, into namespaces of its own.

Promises:
- a box sees the host's system folders read-only, its own processes, its own loopback, and nothing else;
- its programs have no capability, cannot get one, and are an unprivileged user of the host, each box another;
- limits hold for all of a box together, through control groups where this machine lets us have them;
- a box dies with its owner and with the keeper, through the kernel, whatever happens to them.
"""
