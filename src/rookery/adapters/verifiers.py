"""Environment server for verifiers 0.4 and prime-rl: `rookery serve ENV --speak verifiers`.

The server speaks verifiers' protocol: a ZeroMQ ROUTER socket with msgpack frames and the methods `health`, `run`
and `cancel`. prime-rl's orchestrator loads the tasks from a generated package and sends one task per request.

Guarantees:
- Each segment is one branch of the trace. Token IDs, mask and log probabilities of a branch are the segment's, so
  every sampled token trains once.
- A failed rollout is an episode with `ok` False, no trace and the cause as the error's type. prime-rl trains and
  normalises without it.
- A malformed request is answered with `success` False, and the server continues.
- A `cancel` request, or the end of the server, cancels the rollout.
"""

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import msgspec

from rookery import __version__
from rookery.adapters.rollout_service import FinishedRollout, RolloutService
from rookery.adapters.verifiers_package import write_package
from rookery.core import Failed, Message, RookeryError, Sampling, Task, Truncated, Turn, UsageError, label
from rookery.core.errors import describe

TESTED: Final = "0.4.0"
MAX_MESSAGE: Final = 256 << 20
SEND_SECONDS: Final = 60
"""A reply to a client that does not receive is dropped after this time, so that others get theirs."""
STOP_CONDITIONS: Final = {"turns": "max_turns", "tokens": "max_output_tokens", "context": "max_total_tokens"}
"""verifiers' names for the reasons of `Truncated`. Its `is_truncated` recognises only these."""
_NAMED: Final[tuple[str, ...]] = ("temperature", "top_p", "top_k", "max_tokens", "seed")

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
        try:
            zmq: Any = import_module("zmq")
            context = import_module("zmq.asyncio").Context()
        except ImportError as error:
            raise UsageError("--speak verifiers needs pyzmq: pip install 'rookery-rl[verifiers]'") from error
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
                    raise UsageError(f"unknown method {method[:40]!r}: verifiers {TESTED} has health, run, cancel")
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
            "the task data has no field `rookery`: use the taskset package that `rookery serve ENV --speak "
            "verifiers --package DIR` writes"
        )
    return msgspec.convert(data["rookery"], Task)


def parse_sampling(fields: dict[str, Any]) -> Sampling:
    """Return verifiers' sampling parameters. Others, such as `cache_salt`, are passed to the inference engine."""
    given = {name: value for name, value in fields.items() if value is not None}
    stop = given.pop("stop", ())
    known = {name: given.pop(name) for name in _NAMED if name in given}
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    return msgspec.convert({**known, "stop": stop, "extra": given}, Sampling)


def make_episode(
    finished: FinishedRollout, task_data: dict[str, Any], model: str, environment: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a rollout as verifiers' episode: its head, and the delta of its trace if the rollout is valid."""
    rollout = finished.rollout
    # prime-rl refuses an episode whose task has another key or hash than the one that it sent.
    content = json.dumps(task_data["rookery"], sort_keys=True).encode()
    task = {
        "type": "RookeryTask",
        "data": task_data,
        "key": rollout.task,
        "hash": hashlib.sha256(content).hexdigest(),
    }
    head: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "env": {"id": environment},
        "task": task,
        "ok": rollout.valid,
        "errors": [],
    }
    if not rollout.valid:
        detail = rollout.outcome.detail if isinstance(rollout.outcome, Failed) else ""
        head["errors"] = [{"type": label(rollout.outcome), "message": detail}]
        return head, []
    nodes, calls = _make_nodes(finished, model)
    trace_id = uuid.uuid4().hex
    truncated = rollout.outcome.reason if isinstance(rollout.outcome, Truncated) else ""
    versions = [span.version for segment in rollout.segments for span in segment.versions]
    trace = {
        "trace": trace_id,
        "open": {"version": 1, "id": trace_id, "verifiers": {"version": f"rookery {__version__}"}, "task": task},
        "nodes": nodes,
        "calls": calls,
        "set": {
            "agent": {"config": {"model": model}, "name": "agent", "trainable": True},
            "rewards": {"reward": {"score": rollout.reward, "weight": 1.0}},
            "metrics": {**rollout.metrics, **{f"reward/{name}": one for name, one in rollout.rewards.items()}},
            "info": {
                "rookery": {
                    "run": finished.run,
                    "rollout": rollout.id,
                    "attempts": len(rollout.attempts),
                    "versions": [min(versions), max(versions)] if versions else None,
                }
            },
            "is_completed": True,
            "ok": True,
            "is_timeout": truncated == "time",
            "stop_condition": STOP_CONDITIONS.get(truncated, truncated) or "agent_completed",
        },
    }
    return head, [trace]


def _make_nodes(finished: FinishedRollout, model: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return message nodes and model calls. Each segment is a path of nodes with its own root.

    A reply's node holds the prompt tokens before the reply and the sampled tokens. The nodes of other messages
    hold no tokens, because the chat template decides which tokens belong to which message.
    """
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for segment in finished.rollout.segments:
        parent: int | None = None
        previous: Turn | None = None
        for part in finished.split_segment(segment):
            turn = part.turn
            for message in finished.get_new_messages(turn, previous):
                nodes.append({"parent": parent, "message": _format_message(message), "sampled": False})
                parent = len(nodes) - 1
            nodes.append(
                {
                    "parent": parent,
                    "message": _format_message(turn.response),
                    "sampled": True,
                    "timestamp": turn.started + turn.seconds,
                    "token_ids": part.prompt + part.sampled,
                    "mask": [False] * len(part.prompt) + [True] * len(part.sampled),
                    "logprobs": part.logprobs,
                }
            )
            parent, previous = len(nodes) - 1, turn
            calls.append(
                {
                    "node": parent,
                    "model": model,
                    "finish_reason": turn.finish if turn.finish in ("stop", "length", "tool_calls") else None,
                    "usage": {"prompt_tokens": part.start, "completion_tokens": len(part.sampled)},
                    "time": {"start": turn.started, "end": turn.started + turn.seconds},
                }
            )
    return nodes, calls


def _format_message(message: Message) -> dict[str, Any]:
    if message.role == "assistant":
        calls = [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in message.tool_calls]
        return {
            "role": "assistant",
            "content": message.text,
            "reasoning_content": message.reasoning,
            "tool_calls": calls or None,
        }
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id or "", "content": message.text}
    return {"role": "user" if message.role == "user" else "system", "content": message.text}
