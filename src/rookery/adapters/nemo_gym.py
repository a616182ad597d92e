"""Agent server for NeMo Gym and NeMo RL: `rookery serve ENV --speak nemo-gym --policy URL`.

`POST /run` runs one row of the data set and returns Gym's verify response. `POST /aggregate_metrics` returns
means.

Guarantees:
- Each trained turn is one output item with `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`
  from the journal. Each prompt starts with the tokens before it, which NeMo RL asserts and this server checks.
- A status of 5xx (or 429, if too many requests wait) means that the infrastructure failed, so that NeMo RL retries
  the row. A row for which a retry would not help (a broken task, a bug in the environment) is answered with 422.
- NeMo RL takes one token sequence per rollout. Of a rollout with several segments, the one with the most trained
  tokens is sent, and `rookery.tokens_left_out` counts the others.
- A client that disconnects cancels its rollout.
- Requests of web pages are refused: a browser sends `Origin`, and the server has no key.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.adapters.rollout_service import FinishedRollout, QueueFullError, RolloutService, TurnTokens
from rookery.core import Cancelled, Failed, Message, RookeryError, Sampling, Task, UsageError, label
from rookery.core.errors import BatchError
from rookery.gateway.http import HttpError, Request, ResponseWriter
from rookery.gateway.server import Server
from rookery.upstreams.listeners import bind_listener

TESTED: Final = "0.7.0"
MAX_BODY: Final = 64 << 20
TASK_INDEX: Final = "_ng_task_index"
AGENT: Final = {"type": "responses_api_agents", "name": "rookery"}
CONFIG: Final = """\
# Configuration of NeMo Gym for a server that it does not start: there is no `entrypoint`.
# Start it with `rookery serve ENV --speak nemo-gym --policy URL --port {port}`.
rookery:
  responses_api_agents:
    rookery:
      host: {host}
      port: {port}
"""


class ContiguityError(RookeryError):
    """A prompt of an output item does not start with the tokens before it, so NeMo RL would refuse the rollout."""


class _RunRequest(msgspec.Struct):
    responses_create_params: dict[str, Any]
    rookery: dict[str, Any]


class NemoGymServer:
    """Agent server for NeMo Gym and NeMo RL (HTTP)."""

    name = "nemo-gym"
    scheme = "http"
    default_port = 8600

    async def serve(
        self, service: RolloutService, host: str, port: int, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Serve until `stop` is set. `ready` is called with the server's URL when it accepts connections."""
        if not service.has_policy:
            raise UsageError(
                "--speak nemo-gym needs --policy: the URL of NeMo RL's generation server (set "
                "policy.generation.vllm_cfg.expose_http_server) or of a model server of NeMo Gym"
            )
        self._service = service
        sock = bind_listener(host, port)
        server = Server(self._handle, _admit, format_error=_format_error, internal_error=_format_error(500, "bug"))
        try:
            await server.listen(sock)
        except BaseException:
            sock.close()
            raise
        try:
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{sock.getsockname()[1]}")
            await stop.wait()
        finally:
            await server.close(grace=0.0)

    async def _handle(self, request: Request, out: ResponseWriter) -> None:
        if request.method == "GET":
            out.send(200, msgspec.json.encode({"status": "ok", "unfinished": self._service.unfinished}))
        elif request.path == "/aggregate_metrics":
            out.send(200, msgspec.json.encode(aggregate_metrics(_decode(request.body, dict[str, Any]))))
        else:
            out.send(200, msgspec.json.encode(await self._run(request.body)))

    async def _run(self, body: bytes) -> dict[str, Any]:
        row = _decode(body, _RunRequest)
        try:
            task, sampling = msgspec.convert(row.rookery, Task), parse_sampling(row.responses_create_params)
        except msgspec.ValidationError as error:
            raise _refuse(422, f"the row is not valid: {error}") from error
        try:
            finished = await self._service.run(task, sampling=sampling)
        except QueueFullError as error:
            raise _refuse(429, str(error)) from error
        except (UsageError, BatchError) as error:
            raise _refuse(422, str(error)) from error
        except RookeryError as error:
            raise _refuse(503, str(error)) from error
        return make_response(finished, row.responses_create_params)

    @staticmethod
    def write_package(tasks: list[Task], folder: Path, name: str, url: str) -> list[Path]:
        """Write the data set and the configuration of NeMo Gym; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        host, _, port = url.partition("://")[2].rpartition(":")
        rows = [
            {
                "responses_create_params": {
                    "input": [{"role": one.role, "content": one.text} for one in task.prompt],
                },
                "agent_ref": AGENT,
                "environment": name,
                "rookery": task,
            }
            for task in tasks
        ]
        files = {
            folder / "rookery.yaml": CONFIG.format(host=host, port=port).encode(),
            folder / "tasks.jsonl": b"".join(msgspec.json.encode(row) + b"\n" for row in rows),
        }
        for path, data in files.items():
            path.write_bytes(data)
        return list(files)


def parse_sampling(params: dict[str, Any]) -> Sampling:
    """Return the sampling parameters of Gym's `responses_create_params`."""
    names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
    return msgspec.convert(
        {ours: params[theirs] for theirs, ours in names.items() if params.get(theirs) is not None}, Sampling
    )


def make_response(finished: FinishedRollout, params: dict[str, Any]) -> dict[str, Any]:
    """Return Gym's verify response for a rollout. Raise `HttpError` for a rollout that has no reward."""
    rollout = finished.rollout
    if not rollout.valid:
        missing = isinstance(rollout.outcome, Cancelled) or (
            isinstance(rollout.outcome, Failed) and rollout.outcome.fault == "infra"
        )
        detail = rollout.outcome.detail if isinstance(rollout.outcome, Failed) else "the rollout was cancelled"
        raise _refuse(503 if missing else 422, detail, label(rollout.outcome))
    segment = max(rollout.segments, key=lambda one: one.trained, default=None)
    if segment is None or not segment.trained:
        raise _refuse(422, f"rollout {rollout.id} has no trained tokens, which NeMo RL does not accept")
    tokens = memoryview(segment.tokens).cast("i").tolist()
    output: list[dict[str, Any]] = []
    previous: TurnTokens | None = None
    for part in finished.split_segment(segment):
        if previous is not None:
            output += [format_input(one) for one in finished.get_new_messages(part.turn, previous.turn)]
        items = format_reply(part.turn.response)
        items[-1] |= {
            "prompt_token_ids": tokens[: part.start],
            "generation_token_ids": part.sampled,
            "generation_log_probs": part.logprobs,
        }
        output += items
        previous = part
    check_contiguous(output)
    left_out = sum(one.trained for one in rollout.segments) - segment.trained
    return {
        "responses_create_params": params,
        "response": {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": time.time(),
            "model": "policy",
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
        "reward": rollout.reward,
        **{name: value for name, value in rollout.metrics.items() if name not in ("reward", "response")},
        "rookery": {
            "run": finished.run,
            "rollout": rollout.id,
            "outcome": label(rollout.outcome),
            "rewards": rollout.rewards,
            "tokens_left_out": left_out,
        },
    }


def check_contiguous(output: Sequence[dict[str, Any]]) -> None:
    """Raise `ContiguityError` unless each prompt starts with the tokens before it, which NeMo RL asserts."""
    seen: list[int] = []
    for number, item in enumerate(output):
        if not item.get("generation_token_ids"):
            continue
        prompt = item["prompt_token_ids"]
        if prompt[: len(seen)] != seen:
            raise ContiguityError(
                f"the prompt of output item {number} does not start with the {len(seen)} tokens before it"
            )
        if len(item["generation_log_probs"]) != len(item["generation_token_ids"]):
            raise ContiguityError(f"output item {number} has more or fewer log probabilities than tokens")
        seen = prompt + item["generation_token_ids"]


def aggregate_metrics(body: dict[str, Any]) -> dict[str, Any]:
    """Return the means of all numbers in Gym's verify responses, for each task and over all of them.

    Responses with `mask_sample` are left out and counted.
    """
    responses = body.get("verify_responses")
    if not isinstance(responses, list) or not all(isinstance(one, dict) for one in responses):
        raise _refuse(422, "verify_responses must be a list of objects")
    scored = [one for one in responses if not one.get("mask_sample")]
    tasks: dict[Any, list[dict[str, Any]]] = {}
    for one in scored:
        tasks.setdefault(one.get(TASK_INDEX, 0), []).append(one)
    means = _compute_means(scored)
    masked = {"masked_samples": len(responses) - len(scored)} if len(scored) < len(responses) else {}
    return {
        "group_level_metrics": [{TASK_INDEX: index, **_compute_means(one)} for index, one in tasks.items()],
        "agent_metrics": {**means, **masked},
        "key_metrics": {**means, **masked},
    }


def _compute_means(responses: Sequence[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in responses:
        for name, value in one.items():
            if isinstance(value, int | float) and not name.startswith("_") and math.isfinite(value):
                values.setdefault(f"mean/{name}", []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


def format_reply(message: Message) -> list[dict[str, Any]]:
    """Return a reply as items of the Responses API. The last one gets the tokens of the whole reply."""
    items: list[dict[str, Any]] = []
    if message.text or not message.tool_calls:
        text = {"type": "output_text", "text": message.text, "annotations": []}
        items.append(
            {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    items += [
        {"type": "function_call", "call_id": one.id, "name": one.name, "arguments": one.arguments}
        for one in message.tool_calls
    ]
    return items


def format_input(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"type": "function_call_output", "call_id": message.tool_call_id or "", "output": message.text}
    return {"type": "message", "role": message.role, "content": message.text}


def _admit(request: Request) -> int:
    if "origin" in request.headers:  # otherwise any website could run tasks on the user's machine
        raise _refuse(403, "requests of web pages are refused")
    paths = {"/run": "POST", "/aggregate_metrics": "POST", "/": "GET", "/health": "GET"}
    if request.path not in paths:
        raise _refuse(404, f"no such path {request.path[:200]}: this agent server has /run and /aggregate_metrics")
    if request.method != paths[request.path]:
        raise _refuse(405, f"{request.path} accepts only {paths[request.path]}")
    return MAX_BODY if request.method == "POST" else 0


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refuse(
            422, f"the body is not valid: {error}. Rows are written by `rookery serve --package`"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(400, f"the body is not valid JSON: {error}") from error


def _refuse(status: int, text: str, cause: str = "") -> HttpError:
    return HttpError(status, msgspec.json.encode({"error": {"message": text, "cause": cause}}))


def _format_error(status: int, text: str) -> bytes:
    return msgspec.json.encode({"error": {"message": text or str(status), "cause": ""}})
