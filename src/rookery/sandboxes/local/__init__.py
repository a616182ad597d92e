"""The `local` provider: sandboxes from Linux namespaces, cgroups and seccomp, without a container engine.

This package runs in our process. `keeper` is the daemon that forks sandboxes out of itself; what runs inside a
sandbox is in `rookery.sandbox_runtime`.

Guarantees:
- a sandbox sees the host's system directories read-only, its own processes and its own loopback, and nothing else;
- its programs have no capability, cannot gain one, and run as an unprivileged user of the host. Each sandbox
  has other users if Rookery runs as root;
- limits apply to all processes of a sandbox together, through cgroups if this machine allows them;
- the kernel kills a sandbox when its owner or the keeper dies.
"""
