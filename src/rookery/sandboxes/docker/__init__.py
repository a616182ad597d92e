"""The `docker` provider: sandboxes that are containers of a Docker engine or of Podman's compatible service.

PID 1 of a container is the guard: the program that starts, supervises and kills commands, which the `local`
provider uses, too. It is mounted into the container with its own Python interpreter, so an image needs neither
Python nor a shell. The process that owns the sandbox starts commands through the guard's socket instead of the
container engine's API, which makes a command as fast as in a local sandbox.
"""
