"""A runner process on a node of a cluster, as the supervisor sees it. Runs in the supervisor's process."""

import socket
from collections import deque
from typing import TYPE_CHECKING

from rookery.cluster import messages
from rookery.engine.crash_attribution import DeathKind
from rookery.engine.runner_handle import RunnerListener, SeparateRunner
from rookery.engine.runner_protocol import (
    AttemptResult,
    FromRunner,
    RunnerFailed,
    RunSettings,
)
from rookery.gateway.client import GatewayAddress
from rookery.upstreams.pause import PauseCoordinator

if TYPE_CHECKING:
    from rookery.cluster.node_pool import Node


class RemoteRunner(SeparateRunner):
    """A runner process on a node. The node's agent starts it, watches it and kills it."""

    def __init__(
        self, name: str, listener: RunnerListener, node: "Node", settings: RunSettings, writer: str
    ) -> None:
        super().__init__(name, listener, settings)
        self.node = node.name
        self.writer = writer
        self._host = node
        self._pauses: PauseCoordinator | None = None
        self._uncollected: deque[AttemptResult] = deque()
        """Results whose tokens are not collected yet."""
        self.collecting_since = 0.0
        """The time at which the first of them began to wait, or at which its token files grew last."""
        self._exit: tuple[int, str] | None = None
        """Exit status and end of the log if the process has ended before its results were collected."""

    async def open(self, pauses: PauseCoordinator, gateway: GatewayAddress | None) -> None:  # noqa: ARG002
        self._pauses = pauses
        self._host.runners[self.name] = self
        self._host.send(messages.StartRunner(self.name, self.writer))

    async def attach(self, sock: socket.socket) -> None:
        """Use the connection that the node has opened for this runner."""
        assert self._pauses is not None
        await self._connect(sock, self.writer, self._pauses, self._host.gateway)

    def _on_message(self, message: FromRunner) -> None:
        self.last_message = self._loop.time()
        if isinstance(message, AttemptResult):
            self._host.load.observe(max(0.001, message.attempt.ended - message.attempt.started))
            if not self._host.pool.is_collected(message.tokens):
                if not self._uncollected:
                    self.collecting_since = self._loop.time()
                self._uncollected.append(message)
                return
        if isinstance(message, RunnerFailed) and message.disk:
            self._host.lose(message.detail)  # another node may have space
            return
        self.listener.on_message(self, message)

    def on_collected(self, file: str) -> None:
        """Pass on the results whose tokens are collected now that this token file has grown."""
        if self._uncollected and any(one.file == file for one in self._uncollected[0].tokens):
            self.collecting_since = self._loop.time()
        for _ in range(len(self._uncollected)):
            result = self._uncollected.popleft()
            if self._host.pool.is_collected(result.tokens):
                self.listener.on_message(self, result)
            else:
                self._uncollected.append(result)
        if self._exit is not None and not self._uncollected:
            self._finish(*self._exit)

    @property
    def is_collecting(self) -> bool:
        """True if results wait until their tokens are collected."""
        return bool(self._uncollected)

    def on_exit(self, code: int, log_tail: str) -> None:
        """The process has ended. Its last results count if their tokens are on the node's disk."""
        self._exit = code, log_tail
        if not self._uncollected:
            self._finish(code, log_tail)

    def _finish(self, code: int, log_tail: str) -> None:
        self._host.runners.pop(self.name, None)
        self._host.pool.forget(self)
        if not self._dead.is_set():
            self._on_dead(code, log_tail)
        self._host.leave_if_drained()

    def on_node_lost(self, detail: str) -> None:
        self._uncollected.clear()
        self._host.pool.forget(self)
        if not self._dead.is_set():
            self._killed_for = "lost"
            self._connected = False
            self._connection.abort()
            self._dead.set()
            self.listener.on_death(self, "lost", detail)

    def kill(self, why: DeathKind) -> None:
        if not self._dead.is_set():
            self._killed_for = self._killed_for or why
            self._host.send(messages.KillRunner(self.name, stack=why == "blocked"))
