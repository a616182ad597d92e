"""The `docker` provider: containers of a Docker engine on this machine, or of podman's compatible service.

Pid 1 of a container is the same guard that holds the boxes of `local`. It comes with an interpreter of its own, so
an image needs no Python, and no shell. It speaks to its owner over a socket that takes descriptors: a command
costs what it costs in a local box, and no call to the engine.
"""
