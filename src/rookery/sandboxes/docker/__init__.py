"""The `docker` provider: sandboxes that are containers of a Docker engine or of Podman's compatible service.

PID 1 of a container is the guard process that the `local` provider uses, too. It brings its own Python
interpreter, so an image needs neither Python nor a shell. The owner starts commands through the guard's socket
instead of the container engine's API, which makes a command as cheap as in a local sandbox.
"""
