"""Base class for guarded sandboxes that support the networks `model` and `allow`. Runs in the owner's process.

The provider binds a socket to a port of the sandbox's loopback interface. With the network `model`, a server of
the owner accepts connections on it; with the network `allow`, an egress proxy does.
"""

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rookery.core import SandboxError
from rookery.sandboxes.guarded_sandbox import GuardedSandbox
from rookery.sandboxes.protocol import EgressRecord

if TYPE_CHECKING:
    from rookery.sandboxes.egress.proxy import EgressProxy, Resolver


class NetworkedSandbox(GuardedSandbox):
    """A guarded sandbox with a socket on its loopback interface."""

    _proxy: "EgressProxy | None" = None
    _refuses_connections = False

    def duplicate_listener(self) -> socket.socket:
        """Return a duplicate of the socket that listens on the sandbox's loopback interface.

        Programs in the sandbox connect to it to reach the model or the proxy.
        """
        raise NotImplementedError

    def start_proxy(self, resolver: "Resolver", url: str) -> dict[str, str]:
        """Start the proxy of the network `allow`. Return the environment variables that make programs use it.

        `url` is the address of the socket for programs. Does nothing for another network.
        """
        if self.spec.network != "allow":
            return {}
        from rookery.sandboxes.egress.proxy import EgressProxy
        from rookery.sandboxes.egress.rules import EgressRules, proxy_environment

        rules = EgressRules.parse(self.spec.allow)
        self._proxy = EgressProxy(self.duplicate_listener(), rules, self.id, resolver)
        self._proxy.start()
        return proxy_environment(rules, url)

    def listener(self) -> socket.socket:
        self._require_model_network()
        if self._refuses_connections:
            raise SandboxError(
                f"the listener of sandbox {self.id} was closed by refuse_connections()", cause="sandbox.refused"
            )
        return self.duplicate_listener()

    def refuse_connections(self) -> None:
        self._require_model_network()
        # The socket stays bound, so that no program can take the port; old connections would prevent a new bind.
        with self.duplicate_listener() as sock:
            self._refuses_connections = True
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RD)

    def _require_model_network(self) -> None:
        self._require_channel()
        if self.spec.network != "model":
            raise SandboxError(
                f"sandbox {self.id} has the network {self.spec.network!r}: only 'model' has a listener",
                cause="sandbox.refused",
            )

    def egress(self) -> Sequence[EgressRecord]:
        return self._proxy.log.list_records() if self._proxy is not None else ()
