"""Resources servers of NeMo Gym as environments: `nemo-gym:URL`.

    rookery run nemo-gym:http://localhost:12001 --arg dataset=example.jsonl --policy http://localhost:8000/v1

An attempt seeds a session at the server, lets the policy call the server's tools, as Gym's simple agent does, and
has the server verify the conversation. Runs in runner processes; the package nemo-gym is not needed.

Guarantees:
- The server receives each row exactly as it is in the data set, and the conversation as a response of OpenAI's
  Responses API.
- The policy reads the answer of a tool whatever its HTTP status is, as in Gym. If the server cannot be reached, or
  a proxy answers for it (502, 503, 504), the attempt fails with fault infra.
- A sample that the server excludes (`mask_sample`) fails with fault infra: it has no reward.
"""

import asyncio
import json
import math
import time
import uuid
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from rookery.adapters.environments.session_work import read_reward_range
from rookery.adapters.nemo_gym.responses import format_input, format_reply
from rookery.core import Limits, Message, RookeryError, ScoringError, Task, TaskError, ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.environments import Context, Environment, Score
from rookery.gateway.dialects.protocol import BadRequestError
from rookery.gateway.dialects.responses import ResponsesDialect

PARAMS: Final = "responses_create_params"
UNREACHABLE: Final = "tool.unreachable"
PROXY_ERRORS: Final = (502, 503, 504)
MAX_ANSWER: Final = 4 << 20
"""Maximum number of bytes of an answer of the server."""
OWN_FIELDS: Final = ("reward", "mask_sample", "failure_kind", "failure_reason")


class NemoGymEnvironment(Environment):
    """Environment of a running resources server of NeMo Gym. `url` is its address.

    `dataset` is the JSONL file of its tasks, with the key `responses_create_params`. `timeout` is the time limit
    of one request in seconds.
    """

    limits = Limits(run=3600.0, score=600.0)

    def __init__(
        self,
        url: str,
        *,
        dataset: str | Path,
        reward_range: tuple[float, float] = (0.0, 1.0),
        timeout: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"a NeMo Gym environment is named by the URL of its server, not {url!r:.200}")
        self.name = f"nemo-gym:{url}"
        self.url = url.rstrip("/")
        self.dataset = Path(dataset).expanduser().absolute()
        if not self.dataset.is_file():
            raise UsageError(f"the data set {self.dataset} does not exist")
        self.reward_range = read_reward_range(reward_range)
        self._timeout = timeout

    def tasks(self) -> list[Task]:
        tasks = []
        for number, line in enumerate(self.dataset.read_bytes().splitlines()):
            if not line.strip():
                continue
            name = f"{self.dataset.stem}-{number}"
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
                messages, _ = parse_row(row)
            except (msgspec.DecodeError, BadRequestError, KeyError, TypeError) as error:
                text = f"line {number + 1} of {self.dataset} is not a task of NeMo Gym: {describe(error)}"
                tasks.append(Task(id=name, invalid=text))
                continue
            tasks.append(Task(id=name, prompt=tuple(messages), data={"row": row}))
        return tasks

    async def setup(self, ctx: Context) -> None:
        if "row" not in ctx.task.data:
            raise TaskError(f"task {ctx.task.id} has no `row`: use the tasks of the data set")
        # The session of the server is a cookie.
        ctx.state["http"] = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        status, answer = await self._post(ctx, "seed_session", ctx.task.data["row"])
        if status >= 300:
            raise TaskError(
                f"{self.url} refused the task with status {status}: {answer:.1000}", cause="task.setup"
            )

    async def run(self, ctx: Context) -> None:
        prompt, tools = parse_row(ctx.task.data["row"])
        messages = ctx.state["messages"] = list(prompt)
        ctx.state["prompt_length"] = len(prompt)
        while True:
            reply = await ctx.policy.chat(messages, tools=tools)
            messages.append(reply.message)
            if not reply.message.tool_calls:
                return
            for call in reply.message.tool_calls:
                ctx.tool_calls += 1
                text = await ctx.charge_policy("tool", self.call_tool(ctx, call.name, call.arguments, tools))
                messages.append(Message("tool", text, tool_call_id=call.id))

    async def call_tool(self, ctx: Context, name: str, arguments: str, tools: list[ToolSchema]) -> str:
        if name not in {tool.name for tool in tools}:
            return f"there is no tool {name!r:.80}"
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"the arguments are not valid JSON: {error}"
        _, answer = await self._post(ctx, name, parsed)
        return answer

    async def score(self, ctx: Context) -> Score:
        row = ctx.task.data["row"]
        messages = ctx.state.get("messages", [])[ctx.state.get("prompt_length", 0) :]
        body = {**row, "response": make_response(row[PARAMS], messages)}
        status, answer = await self._post(ctx, "verify", body)
        if status >= 300:
            raise ScoringError(f"{self.url} failed to verify, with status {status}: {answer:.1000}")
        try:
            result = msgspec.json.decode(answer, type=dict[str, Any])
            reward = float(result["reward"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise ScoringError(f"{self.url} returned no reward: {describe(error)}") from error
        if result.get("mask_sample"):
            reason = result.get("failure_reason") or result.get("failure_kind") or "it gave no reason"
            raise RookeryError(f"{self.url} excluded the sample: {reason}", cause=UNREACHABLE)
        parts = result.get("reward_components") or {}
        metrics = {
            key: float(value)
            for key, value in result.items()
            if isinstance(value, int | float) and key not in OWN_FIELDS and math.isfinite(value)
        }
        return Score(reward, {str(key): float(value) for key, value in parts.items()}, metrics)

    async def teardown(self, ctx: Context) -> None:
        if "http" in ctx.state:
            await ctx.state["http"].close()

    async def _post(self, ctx: Context, path: str, body: Any) -> tuple[int, str]:
        """Send a request. Return the status and the text of the answer."""
        http: aiohttp.ClientSession = ctx.state["http"]
        try:
            async with asyncio.timeout(self._timeout), http.post(f"{self.url}/{path}", json=body) as response:
                data = await response.content.read(MAX_ANSWER)
                while len(data) < MAX_ANSWER and (more := await response.content.read(MAX_ANSWER - len(data))):
                    data += more
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RookeryError(
                f"the resources server {self.url} did not answer /{path}: {describe(error)}", cause=UNREACHABLE
            ) from error
        if response.status in PROXY_ERRORS:
            raise RookeryError(
                f"the resources server {self.url} answered /{path} with status {response.status}",
                cause=UNREACHABLE,
            )
        return response.status, data.decode("utf-8", "replace")


def parse_row(row: dict[str, Any]) -> tuple[list[Message], list[ToolSchema]]:
    """Return the prompt and the tools of a row of NeMo Gym."""
    params = {key: value for key, value in row[PARAMS].items() if key in ("input", "instructions", "tools")}
    request = ResponsesDialect().parse_request(msgspec.json.encode({"model": "policy", **params}))
    messages = [message for message in request.messages if isinstance(message, Message)]
    return messages, list(request.tools.schemas)


def make_response(params: dict[str, Any], messages: list[Message]) -> dict[str, Any]:
    """Return the conversation after the prompt as a response of the Responses API."""
    output = [
        item
        for message in messages
        for item in (format_reply(message) if message.role == "assistant" else [format_input(message)])
    ]
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": time.time(),
        "model": "policy",
        "object": "response",
        "output": output,
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
        "status": "completed",
    }
