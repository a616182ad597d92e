"""The `local` provider: sandboxes from Linux namespaces, cgroups and seccomp, without a container engine.

This package runs in the process that creates sandboxes, their owner, except the subpackage `keeper`: that is the
daemon that creates each sandbox as a fork of itself. The code that runs inside a sandbox is in
`rookery.sandbox_runtime`.

Guarantees:
- a sandbox without an image or mounts sees the host's system directories, which it cannot change, its own
  processes and its own loopback interface, and nothing else of the host;
- its programs have no Linux capability, cannot gain one, and run as an unprivileged user of the host. If Rookery
  runs as root, each sandbox has its own range of user IDs;
- limits apply to all processes of a sandbox together, through cgroups if this machine allows them;
- the kernel kills a sandbox when its owner or the keeper dies.
"""
