"""Serve an environment in OpenEnv's protocol: `rookery serve ENV --protocol openenv`. The client is the policy.

A WebSocket connection is one session, which runs one rollout at a time. `reset` starts the rollout of a task, and
the observation is what the policy reads. `step` gives the policy's reply, and the last observation has the reward.
Clients without WebSockets use `POST /reset` and `POST /step`: `episode_id` names their session. OpenEnv's Task API
(`/NAME/tasks` and so on) lists the tasks.

Guarantees:
- Closing the connection cancels the rollout and removes its sandboxes. A session without a connection ends with
  its rollout, or if it is not used for `IDLE_SECONDS`.
- After an infrastructure failure, the rollout is repeated in a fresh sandbox with the replies so far. A rollout
  that fails finally is an error of the protocol (`EXECUTION_ERROR`) and never a reward.
- There are at most as many sessions as the run's concurrency; another one gets `CAPACITY_REACHED`. A session
  counts until its engine is closed. A new session waits if it only lacks the place of one that is being closed.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from aiohttp import WSMsgType, web

from rookery.adapters.rollout_service import RolloutService
from rookery.adapters.stepped_rollout import Observation, SteppedRollout
from rookery.adapters.task_rows import get_tasks
from rookery.core import Message, RookeryError, Task, ToolCall, UsageError
from rookery.core.errors import describe

MAX_MESSAGE: Final = 16 << 20
HEARTBEAT: Final = 30.0
IDLE_SECONDS: Final = 900.0
SPLIT: Final = "train"
"""Name of the only split of the Task API."""
_NO_EPISODE: Final = "pass the episode_id of a rollout that is running: call reset first"
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

    def __init__(self, rollout: SteppedRollout, tasks: "_Tasks") -> None:
        self._rollout = rollout
        self._tasks = tasks
        self._task = ""
        self._steps = 0

    async def answer(self, kind: str, data: Any) -> dict[str, Any]:
        if kind == "reset":
            self._task, self._steps = self._tasks.choose(data if isinstance(data, dict) else {}), 0
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
        app.router.add_post("/reset", handler.reset)
        app.router.add_post("/step", handler.step)
        app.router.add_get("/state", handler.state)
        app.router.add_get("/list_environments", handler.list_environments)
        app.router.add_get("/{name}/splits", handler.list_splits)
        app.router.add_post("/{name}/{what:tasks|num_tasks|task|task_range}", handler.describe_tasks)
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


class _Tasks:
    """The valid tasks of the environment, in order."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.all = [task for task in tasks if not task.invalid]
        self._order = itertools.cycle(self.all)

    def choose(self, reset: Mapping[str, Any]) -> str:
        """Return the ID of the task that the arguments of `reset` name: by ID, or by its index in the split.

        Without one, return the next task. Raise `UsageError` for an unknown split or index.
        """
        if task := reset.get("task"):
            return str(task)
        if (index := reset.get("index")) is None:
            return next(self._order).id
        if reset.get("split", SPLIT) != SPLIT or not isinstance(index, int) or not 0 <= index < len(self.all):
            raise UsageError(f"there is no task {index!r:.80} in the split {reset.get('split', SPLIT)!r:.80}")
        return self.all[index].id

    def describe(self, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the IDs and prompts of tasks. Expected answers and tests stay here."""
        found = enumerate(self.all)
        return [{"id": task.id, "index": at, "prompt": task.text} for at, task in found][start:stop]


class _HttpSession(_Session):
    """A session of a client without a connection."""

    def __init__(self, rollout: SteppedRollout, tasks: _Tasks) -> None:
        super().__init__(rollout, tasks)
        self.rollout = rollout
        self.lock = asyncio.Lock()
        self.timer: asyncio.TimerHandle | None = None


class _Handler:
    """The routes of the server."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._sockets: set[web.WebSocketResponse] = set()
        self.episodes: dict[str, _HttpSession] = {}
        """Sessions of clients without a connection, by the ID of the episode."""
        self._closing: set[asyncio.Task[None]] = set()
        self._loaded: _Tasks | None = None

    @property
    def _tasks(self) -> _Tasks:
        if self._loaded is None:
            self._loaded = _Tasks(get_tasks(self._service.environment, None))
        return self._loaded

    async def can_open_session(self) -> bool:
        """Return whether another session may start, after waiting for those that are being closed if needed."""
        limit = self._service.config.concurrency
        while (opened := len(self._sockets) + len(self.episodes)) < limit:
            if opened + len(self._closing) < limit:
                return True
            await asyncio.wait(self._closing, return_when=asyncio.FIRST_COMPLETED)
        return False

    def open_rollout(self) -> SteppedRollout:
        config = self._service.config
        return SteppedRollout(config.environment, config=config, out=self._service.out)

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
        for episode in tuple(self.episodes):
            self.end_episode(episode)
        if self._closing:
            await asyncio.wait(set(self._closing))

    # ---- the Task API

    async def list_environments(self, _: web.Request) -> web.Response:
        return web.json_response([self._service.environment.title])

    async def list_splits(self, request: web.Request) -> web.Response:
        self._check_name(request)
        return web.json_response([{"name": SPLIT, "type": SPLIT}])

    async def describe_tasks(self, request: web.Request) -> web.Response:
        self._check_name(request)
        query, tasks = await _read_body(request), self._tasks
        if query.get("split", SPLIT) != SPLIT:
            raise _refuse(web.HTTPBadRequest, f"there is no split {query['split']!r:.80}, only {SPLIT!r}")
        match request.match_info["what"]:
            case "num_tasks":
                return web.json_response({"num_tasks": len(tasks.all)})
            case "task":
                index = query.get("index")
                if not isinstance(index, int) or not 0 <= index < len(tasks.all):
                    raise _refuse(web.HTTPBadRequest, "Invalid task index")
                return web.json_response({"task": tasks.describe(index, index + 1)[0]})
            case "task_range":
                start, stop = query.get("start") or 0, query.get("stop")
                if not all(isinstance(bound, int) and bound >= 0 for bound in (start, stop or 0)):
                    raise _refuse(web.HTTPBadRequest, "start and stop must be numbers of at least 0")
                return web.json_response({"tasks": tasks.describe(start, stop)})
        return web.json_response({"tasks": tasks.describe(), "env_name": self._service.environment.title})

    def _check_name(self, request: web.Request) -> None:
        _refuse_pages(request)
        if request.match_info["name"].lower() != self._service.environment.title.lower():
            raise _refuse(web.HTTPNotFound, f"unknown environment {request.match_info['name']!r:.80}")

    # ---- sessions without a connection

    async def reset(self, request: web.Request) -> web.Response:
        body = await _read_body(request)
        name = str(body.get("episode_id") or secrets.token_hex(8))
        may_open = name in self.episodes or await self.can_open_session()
        session = self.episodes.get(name)
        if session is None:
            if not may_open:
                limit = self._service.config.concurrency
                raise _refuse(web.HTTPServiceUnavailable, f"{limit} sessions are open, which is the maximum (-c)")
            try:
                session = self.episodes[name] = _HttpSession(self.open_rollout(), self._tasks)
            except RookeryError as error:
                raise _refuse(web.HTTPInternalServerError, str(error)) from error
        return await self.answer(name, session, "reset", body)

    async def step(self, request: web.Request) -> web.Response:
        body = await _read_body(request)
        name, session = self._find_episode(body.get("episode_id"))
        return await self.answer(name, session, "step", body.get("action", {}))

    async def state(self, request: web.Request) -> web.Response:
        _refuse_pages(request)
        _, session = self._find_episode(request.query.get("episode_id"))
        return web.json_response(await session.answer("state", {}))

    def _find_episode(self, name: Any) -> tuple[str, _HttpSession]:
        if name is None and len(self.episodes) == 1:
            name = next(iter(self.episodes))
        session = self.episodes.get(str(name))
        if session is None:
            raise _refuse(web.HTTPBadRequest, _NO_EPISODE)
        return str(name), session

    async def answer(self, name: str, session: _HttpSession, kind: str, data: Any) -> web.Response:
        async with session.lock:
            if self.episodes.get(name) is not session:  # an earlier request ended it
                raise _refuse(web.HTTPBadRequest, _NO_EPISODE)
            if session.timer is not None:
                session.timer.cancel()
            ended = True  # also if this request is cancelled
            try:
                found = await session.answer(kind, data)
                ended = found["done"]
            except msgspec.ValidationError as error:
                ended = False
                detail = [{"msg": str(error), "loc": ["body", "action"]}]
                raise _refuse(web.HTTPUnprocessableEntity, detail) from error
            except RookeryError as error:
                refusal = web.HTTPBadRequest if isinstance(error, UsageError) else web.HTTPInternalServerError
                raise _refuse(refusal, str(error)) from error
            finally:
                if ended:
                    self.end_episode(name)
                else:
                    loop = asyncio.get_running_loop()
                    session.timer = loop.call_later(IDLE_SECONDS, self.end_episode, name)
        found["metadata"] = found["observation"]["metadata"] = {**found["metadata"], "episode_id": name}
        return web.json_response(found, dumps=lambda value: msgspec.json.encode(value).decode())

    def end_episode(self, name: str) -> None:
        """Forget a session, and close its engine in the background."""
        session = self.episodes.pop(name, None)
        if session is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        self._close_rollout(session.rollout)

    def _close_rollout(self, rollout: SteppedRollout) -> asyncio.Task[None]:
        """Close the engine of a session in the background. The session counts until that is done."""
        closing = asyncio.create_task(rollout.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    # ---- sessions with a connection

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        _refuse_pages(request)
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        if not await self.can_open_session():
            text = f"{self._service.config.concurrency} sessions are open, which is the maximum (-c)"
            await _send(socket, "error", {"message": text, "code": "CAPACITY_REACHED"})
            await socket.close()
            return socket
        self._sockets.add(socket)
        rollout: SteppedRollout | None = None
        try:
            rollout = self.open_rollout()
            await self._converse(socket, _Session(rollout, self._tasks))
        except RookeryError as error:
            await _send(socket, "error", {"message": str(error), "code": "FACTORY_ERROR"})
        finally:
            self._sockets.discard(socket)
            if rollout is not None:
                await asyncio.shield(self._close_rollout(rollout))
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


def _refuse_pages(request: web.Request) -> None:
    if "origin" in request.headers:  # otherwise any website could run tasks on the user's machine
        raise web.HTTPForbidden(text="requests of web pages are refused")


def _refuse(kind: type[web.HTTPError], detail: Any) -> web.HTTPError:
    """Return an HTTP error with the body that OpenEnv's own server sends."""
    return kind(text=msgspec.json.encode({"detail": detail}).decode(), content_type="application/json")


async def _read_body(request: web.Request) -> dict[str, Any]:
    _refuse_pages(request)
    try:
        body = msgspec.json.decode(await request.read() or b"{}")
    except msgspec.DecodeError as error:
        raise _refuse(web.HTTPUnprocessableEntity, f"this is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise _refuse(web.HTTPUnprocessableEntity, "the body must be an object")
    return body


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
