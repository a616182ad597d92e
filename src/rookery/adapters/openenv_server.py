"""Serve an environment in OpenEnv's protocol: `rookery serve ENV --speak openenv`. The client is the policy.

A WebSocket connection is one session, which runs one rollout at a time. `reset` starts the rollout of a task, and
the observation is what the policy reads. `step` gives the policy's reply, and the last observation has the reward.

Guarantees:
- Closing the connection cancels the rollout and removes its sandboxes.
- After an infrastructure failure, the rollout is repeated in a fresh sandbox with the replies so far. A rollout
  that fails finally is an error of the protocol (`EXECUTION_ERROR`) and never a reward.
- There are at most as many sessions as the run's concurrency; another one gets `CAPACITY_REACHED`.
"""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from aiohttp import WSMsgType, web

from rookery.adapters.rollout_service import RolloutService
from rookery.adapters.stepped_rollout import Observation, SteppedRollout
from rookery.core import Message, RookeryError, Task, ToolCall, UsageError
from rookery.core.errors import describe

MAX_MESSAGE: Final = 16 << 20
HEARTBEAT: Final = 30.0
_CALL: Final = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "name": {"type": "string"}, "arguments": {"type": "string"}},
    "required": ["name"],
}
ACTION: Final = {
    "title": "RookeryAction",
    "description": "A reply of the policy: text, tool calls, or both.",
    "type": "object",
    "properties": {
        "message": {"type": "string", "default": ""},
        "tool_calls": {"type": "array", "items": _CALL, "default": []},
        "metadata": {"type": "object"},
    },
}
OBSERVATION: Final = {
    "title": "RookeryObservation",
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
    },
}
STATE: Final = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}},
}


class ActionCall(msgspec.Struct, frozen=True):
    """A tool call in an action. `arguments` is a JSON object, or its text."""

    name: str
    arguments: str | dict[str, Any] = "{}"
    id: str = ""


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data of OpenEnv's message `step`."""

    message: str = ""
    tool_calls: tuple[ActionCall, ...] = ()
    metadata: dict[str, Any] = {}


class _Session:
    """One connection: an engine with the client as its policy."""

    def __init__(self, rollout: SteppedRollout, order: "itertools.cycle[Task]") -> None:
        self._rollout = rollout
        self._order = order
        self._task = ""
        self._steps = 0

    async def answer(self, kind: str, data: Any) -> dict[str, Any]:
        if kind == "reset":
            task = data.get("task") if isinstance(data, dict) else None
            self._task, self._steps = str(task or next(self._order).id), 0
            return _format_observation(await self._rollout.reset(self._task), self._task)
        if kind == "step":
            action = msgspec.convert(data, Action)
            self._steps += 1
            calls = tuple(
                ToolCall(
                    call.id or f"call_{self._steps}_{n}",
                    call.name,
                    call.arguments
                    if isinstance(call.arguments, str)
                    else msgspec.json.encode(call.arguments).decode(),
                )
                for n, call in enumerate(action.tool_calls)
            )
            reply = Message("assistant", action.message or (None if calls else ""), calls)
            return _format_observation(await self._rollout.reply(reply), self._task)
        return {"episode_id": self._task, "step_count": self._steps}


class OpenEnvServer:
    """Serves an environment to clients of OpenEnv, which sample the replies."""

    name = "OpenEnv"
    scheme = "http"
    default_port = 8000

    async def serve(
        self, service: RolloutService, host: str, port: int, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Serve until `stop` is set."""
        app = web.Application(client_max_size=MAX_MESSAGE)
        handler = _Handler(service)
        app.router.add_get("/health", handler.health)
        app.router.add_get("/schema", handler.schema)
        app.router.add_get("/metadata", handler.metadata)
        app.router.add_get("/ws", handler.connect)
        app.on_shutdown.append(handler.close)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=10)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise UsageError(f"the server cannot listen on {host}:{port}: {describe(error)}") from error
            ready(f"http://{host}:{runner.addresses[0][1]}")
            await stop.wait()
        finally:
            await runner.cleanup()

    @staticmethod
    def write_package(tasks: list[Task], folder: Path, name: str, url: str) -> list[Path]:
        """Write the arguments of `reset` for all tasks, one per line, as `tasks.jsonl`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tasks.jsonl"
        rows = [
            {"reset": {"task": task.id}, "url": url, "environment": name} for task in tasks if not task.invalid
        ]
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return [path]


class _Handler:
    """The routes of the server."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._sockets: set[web.WebSocketResponse] = set()
        self._order: itertools.cycle[Task] | None = None

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def schema(self, _: web.Request) -> web.Response:
        return web.json_response({"action": ACTION, "observation": OBSERVATION, "state": STATE})

    async def metadata(self, _: web.Request) -> web.Response:
        title = self._service.environment.title
        return web.json_response({"name": title, "description": f"{title}, served by Rookery"})

    async def close(self, _: web.Application) -> None:
        for socket in tuple(self._sockets):
            await socket.close()

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        if "origin" in request.headers:  # otherwise any website could run tasks on the user's machine
            raise web.HTTPForbidden(text="requests of web pages are refused")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        limit = self._service.config.concurrency
        if len(self._sockets) >= limit:
            text = f"{limit} sessions are open, which is the maximum (-c)"
            await _send(socket, "error", {"message": text, "code": "CAPACITY_REACHED"})
            await socket.close()
            return socket
        self._sockets.add(socket)
        rollout: SteppedRollout | None = None
        try:
            rollout = SteppedRollout(
                self._service.config.environment, config=self._service.config, out=self._service.out
            )
            self._order = self._order or itertools.cycle(rollout.tasks)
            await self._converse(socket, _Session(rollout, self._order))
        except RookeryError as error:
            await _send(socket, "error", {"message": str(error), "code": "FACTORY_ERROR"})
        finally:
            self._sockets.discard(socket)
            if rollout is not None:
                await asyncio.shield(asyncio.ensure_future(rollout.aclose()))
            await socket.close()
        return socket

    async def _converse(self, socket: web.WebSocketResponse, session: _Session) -> None:
        """Answer the messages of a connection until it is closed."""
        async for received in socket:
            if received.type is not WSMsgType.TEXT:
                return
            try:
                message = msgspec.json.decode(received.data)
                kind = message.get("type") if isinstance(message, dict) else None
            except msgspec.DecodeError as error:
                await _send(
                    socket, "error", {"message": f"this is not valid JSON: {error}", "code": "INVALID_JSON"}
                )
                continue
            if kind == "close":
                return
            if kind not in ("reset", "step", "state"):
                await _send(socket, "error", {"message": f"unknown type {kind!r:.80}", "code": "UNKNOWN_TYPE"})
                continue
            try:
                data = await session.answer(cast("str", kind), message.get("data", {}))
            except msgspec.ValidationError as error:
                found = {
                    "message": "the action is not valid",
                    "code": "VALIDATION_ERROR",
                    "errors": [{"msg": str(error)}],
                }
                await _send(socket, "error", found)
            except RookeryError as error:
                await _send(socket, "error", {"message": str(error), "code": "EXECUTION_ERROR"})
            else:
                await _send(socket, "state" if kind == "state" else "observation", data)


async def _send(socket: web.WebSocketResponse, kind: str, data: dict[str, Any]) -> None:
    if not socket.closed:
        await socket.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())


def _format_observation(found: Observation, task: str) -> dict[str, Any]:
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in found.tools
    ]
    return {
        "observation": {
            "messages": [{"role": one.role, "content": one.text} for one in found.messages],
            "tools": tools[:-1],  # the last one replaces text in protocols that have tool calls only
            "metadata": {"task": task},
        },
        "reward": found.reward,
        "done": found.reward is not None,
        "metadata": {"task": task},
    }
