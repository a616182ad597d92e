"""ZeroMQ server that speaks verifiers' protocol. It runs in the process of `rookery serve`."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import msgspec

from rookery.adapters.compatibility import check_version, parse_sampling
from rookery.adapters.rollout_service import RolloutService
from rookery.adapters.verifiers.episodes import make_episode
from rookery.adapters.verifiers.taskset_package import TESTED, write_package
from rookery.core import RookeryError, Task, UsageError
from rookery.core.errors import describe

MAX_MESSAGE: Final = 256 << 20
SEND_SECONDS: Final = 60
"""A reply to a client that does not receive is dropped after this time, so that others get theirs."""

log = logging.getLogger("rookery.adapters.verifiers")


class _RunRequest(msgspec.Struct):
    task_data: dict[str, Any]
    client: dict[str, Any]
    model: str
    sampling: dict[str, Any]


class VerifiersServer:
    """Environment server for verifiers and prime-rl (ZeroMQ, msgpack)."""

    name = "verifiers"
    scheme = "tcp"
    default_port = 5000
    write_package = staticmethod(write_package)

    def __init__(self) -> None:
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    async def serve(
        self, service: RolloutService, host: str, port: int, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Serve until `stop` is set. `ready` is called with the server's URL when it accepts connections."""
        check_version(*TESTED)
        try:
            zmq: Any = import_module("zmq")
            context = import_module("zmq.asyncio").Context()
        except ImportError as error:
            raise UsageError("--protocol verifiers needs pyzmq: pip install 'rookery-rl[verifiers]'") from error
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.SNDTIMEO, 1000 * SEND_SECONDS)
        try:
            try:
                socket.bind(f"tcp://{host}:{port}" if port else f"tcp://{host}:*")
            except zmq.ZMQError as error:
                raise UsageError(f"cannot listen on {host}:{port}: {error}") from error
            ready(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            await self._receive(service, socket, stop)
        finally:
            socket.close()
            context.term()

    async def _receive(self, service: RolloutService, socket: Any, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        try:
            async with asyncio.TaskGroup() as tasks:
                while not stop.is_set():
                    receiving = asyncio.ensure_future(socket.recv_multipart())
                    await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    if not receiving.done():
                        receiving.cancel()
                        break
                    frames = receiving.result()
                    if len(frames) != 4:
                        log.warning("dropped a message of %d frames: verifiers sends 3", len(frames) - 1)
                        continue
                    client, request, method, payload = frames
                    task = tasks.create_task(self._answer(service, socket, client, request, method, payload))
                    if method == b"run":  # before the task starts: a cancel request may already be queued
                        self._running[request] = task
                        task.add_done_callback(partial(self._forget, request))
                for task in self._running.values():
                    task.cancel()
        finally:
            stopping.cancel()

    def _forget(self, request: bytes, task: asyncio.Task[None]) -> None:
        if self._running.get(request) is task:
            del self._running[request]

    async def _answer(
        self, service: RolloutService, socket: Any, client: bytes, request: bytes, method: bytes, payload: bytes
    ) -> None:
        answer: dict[str, Any]
        try:
            match method:
                case b"health":
                    answer = {}
                case b"cancel":
                    wanted = msgspec.msgpack.decode(payload, type=dict[str, str])["request_id"].encode()
                    running = self._running.get(wanted)
                    answer = {"cancelled": running is not None and running.cancel()}
                case b"run":
                    answer = await self._run(service, socket, client, request, payload)
                case _:
                    raise UsageError(
                        f"unknown method {method[:40]!r}: verifiers {TESTED[1]} has health, run, cancel"
                    )
            answer = {"success": True, "error": None, **answer}
        except asyncio.CancelledError:
            answer = {"success": False, "error": "Cancelled: the rollout was cancelled"}
        except (RookeryError, msgspec.MsgspecError, KeyError) as error:
            answer = {"success": False, "error": describe(error)}
        except Exception as error:
            log.exception("request failed")
            answer = {"success": False, "error": describe(error)}
        await self._send(socket, client, request, b"reply", answer)

    async def _send(self, socket: Any, client: bytes, request: bytes, kind: bytes, data: Any) -> None:
        zmq: Any = import_module("zmq")
        frames = [client, request, kind, msgspec.msgpack.encode(data)]
        try:
            async with self._sending:
                await socket.send_multipart(frames)
        except zmq.ZMQError as error:
            log.warning("a client disconnected before its %s was sent: %s", kind.decode(), error)

    async def _run(
        self, service: RolloutService, socket: Any, client: bytes, request: bytes, payload: bytes
    ) -> dict[str, Any]:
        wanted = msgspec.msgpack.decode(payload, type=_RunRequest)
        finished = await service.run(
            parse_task(wanted.task_data),
            policy=str(wanted.client.get("base_url", "")),
            model=wanted.model,
            sampling=parse_sampling(wanted.sampling),
        )
        head, traces = make_episode(finished, wanted.task_data, wanted.model, service.environment.title)
        for trace in traces:
            await self._send(socket, client, request, b"delta", trace)
        sizes = [{"id": one["trace"], "nodes": len(one["nodes"]), "calls": len(one["calls"])} for one in traces]
        return {"head": head, "traces": sizes}


def parse_task(data: dict[str, Any]) -> Task:
    """Return the task in the field `rookery` of a generated package's task data."""
    if "rookery" not in data:
        raise UsageError(
            "the task data has no field `rookery`: use the taskset package that `rookery serve ENV --protocol "
            "verifiers --package DIR` writes"
        )
    return msgspec.convert(data["rookery"], Task)
