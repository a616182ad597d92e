"""Base class for guarded sandboxes with their own users and network. Runs in the owner's process.

The provider binds a socket to a port of the sandbox's loopback interface. With the network `model`, a server of
the owner accepts connections on it; with the network `allow`, an egress proxy does.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes.guarded_sandbox import (
    DEFAULT_USER,
    MAX_PASSWD_BYTES,
    CommandUser,
    GuardedSandbox,
    find_user,
)
from rookery.sandboxes.protocol import EgressRecord

if TYPE_CHECKING:
    from rookery.sandboxes.egress.proxy import EgressProxy, Resolver

WORK = "/work"
USER = 1000
PORT = 7465
"""TCP port on a sandbox's loopback interface on which the owner serves the networks `model` and `allow`."""
URL = f"http://127.0.0.1:{PORT}"
_USER_NAMES = {0: "root", USER: "user"}


class ResolverOwner(Protocol):
    """A provider, whose sandboxes share one resolver of host names."""

    resolver: "Resolver | None"
    """None until a sandbox has the network `allow`."""


class NetworkedSandbox(GuardedSandbox):
    """A guarded sandbox with its own users and with a socket on its loopback interface.

    This class resolves the users of commands, makes the variables that every command gets, with `WORK` as home
    directory, and serves the networks: it hands out the socket for `model`, and starts the proxy for `allow`.
    Subclasses set `_uid` and `_base_env`, choose the working directory of commands, and provide the socket and the
    access to files. `close` ends file transfers, closes the descriptors of files, ends the proxy, and ends the
    guard last.
    """

    def __init__(self, identity: str, spec: SandboxSpec, marker: str, on_closed: Callable[[Any], None]) -> None:
        super().__init__(identity, spec, marker, on_closed)
        self.inside_url = URL if spec.network == "model" else ""
        self._uid = -1
        """User ID, inside the sandbox, of commands that name no user."""
        self._proxy: EgressProxy | None = None
        self._refuses_connections = False

    def close_files(self) -> None:
        """Close the descriptors through which the sandbox's files are accessed. Called first when it is closed."""
        raise NotImplementedError

    def duplicate_listener(self) -> socket.socket:
        """Return a duplicate of the socket that listens on the sandbox's loopback interface.

        Programs in the sandbox connect to it to reach the model or the proxy.
        """
        raise NotImplementedError

    def make_environment(self, path: str, image: Mapping[str, str], owner: ResolverOwner) -> dict[str, str]:
        """Return the variables that every command gets. Start the proxy if the network is `allow`.

        `path` is the default of `PATH`, and `image` has the variables of the sandbox's image.
        """
        return {
            "PATH": path,
            "HOME": WORK,
            "USER": _USER_NAMES.get(self._uid, str(self._uid)),
            "TMPDIR": "/tmp",  # noqa: S108  (inside the sandbox)
            "LANG": "C.UTF-8",
            **image,
            **(self._start_proxy(owner) if self.spec.network == "allow" else {}),
            **self.spec.env,
        }

    def _start_proxy(self, owner: ResolverOwner) -> dict[str, str]:
        """Start the proxy of the network `allow`. Return the environment variables that make programs use it."""
        from rookery.sandboxes.egress.proxy import EgressProxy, Resolver
        from rookery.sandboxes.egress.rules import EgressRules, proxy_environment

        owner.resolver = owner.resolver or Resolver()
        rules = EgressRules.parse(self.spec.allow)
        self._proxy = EgressProxy(self.duplicate_listener(), rules, self.id, owner.resolver)
        self._proxy.start()
        return proxy_environment(rules, URL)

    # ---- users

    def get_default_uid(self) -> int:
        return self._uid

    def is_default_user(self, user: str) -> bool:
        return user in (str(self._uid), _USER_NAMES.get(self._uid)) or (user == "image" and self.spec.user == user)

    async def resolve_user(self, user: str) -> CommandUser:
        if self.is_default_user(user):
            return DEFAULT_USER
        return await find_user(user, partial(self.read, limit=MAX_PASSWD_BYTES))

    # ---- the network `model`

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

    async def _close(self) -> None:
        await self._transfers.stop()  # none may use a descriptor that is closed next
        self.close_files()
        try:
            if self._proxy is not None:
                await self._proxy.close()
        finally:
            await super()._close()
