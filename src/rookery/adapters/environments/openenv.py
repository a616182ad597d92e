"""OpenEnv servers as environments: `openenv:URL`, for example `openenv:http://localhost:8000`.

    rookery run openenv:http://localhost:8000 --arg max_steps=5 --policy http://localhost:8000/v1

An attempt is one WebSocket connection, to which the server gives its own environment instance. The policy sees the
server's observations. Its replies are actions, or calls of the tools that the server offers. Runs in runner
processes; the package openenv is not needed.

Guarantees:
- The reward is computed from the rewards of the server's steps alone. A step without a reward counts as 0.
- An action that is not valid JSON or does not fit the schema is a result: the policy reads what is wrong.
- A server that cannot be reached, has no free session or loses the connection fails the attempt with fault infra.
- The connection is kept alive while the policy samples, and closed when the attempt ends.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, get_args

import aiohttp

from rookery.adapters.environments.session_work import ScoredInRun, read_reward_range
from rookery.core import Limits, Message, RookeryError, Task, ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.environments import Context, Score

INSTRUCTIONS: Final = """You act in an environment. Each message from the user is an observation of it. Reply \
with your next action and nothing else: one JSON object that matches this JSON schema.
{schema}"""
GENERIC: Final = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of action schemas that say nothing about the environment's actions: it offers tools instead."""
HEARTBEAT: Final = 20.0
MAX_MESSAGE: Final = 16 << 20
UNREACHABLE: Final = "tool.unreachable"
Combine = Literal["sum", "last"]


class ActionError(Exception):
    """An action of the policy that the server cannot take. The message is for the policy."""


class OpenEnvConnection:
    """One session at an OpenEnv server."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float) -> None:
        self._socket = socket
        self._url = url
        self._timeout = timeout

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the reply.

        Raise `ActionError` if the server rejects the data of a step, and `RookeryError` if it fails.
        """
        try:
            await self._socket.send_json({"type": kind, "data": data})
            reply = await self._socket.receive_json(timeout=self._timeout)
        except (aiohttp.ClientError, TypeError, ValueError, TimeoutError, ConnectionError) as error:
            code = self._socket.close_code
            raise RookeryError(
                f"the OpenEnv server {self._url} did not answer `{kind}` (close code {code}): {describe(error)}",
                cause=UNREACHABLE,
            ) from error
        found = reply.get("data")
        if not isinstance(found, dict):
            raise RookeryError(f"the OpenEnv server {self._url} sent no data for `{kind}`", cause=UNREACHABLE)
        if reply.get("type") != "error":
            return found
        code, text = found.get("code"), found.get("message")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ActionError(json.dumps(found.get("errors", text), default=str))
        cause = "bug.environment" if code in ("EXECUTION_ERROR", "VALIDATION_ERROR") else UNREACHABLE
        raise RookeryError(f"the OpenEnv server {self._url} answered `{kind}` with {code}: {text}", cause=cause)


class OpenEnvEnvironment(ScoredInRun):
    """Environment of a running OpenEnv server. `url` is its address.

    Each entry of `resets` is a task: the arguments of the server's `reset`. Tasks of a file have the key `reset`
    instead. After `max_steps` steps the attempt ends, also if the server does not end it. `reward` says whether
    the rewards of the steps are summed or only the last one counts. `instructions` replaces the system prompt; in
    it, `{schema}` is the schema of actions.
    """

    limits = Limits(run=3600.0)

    def __init__(
        self,
        url: str,
        *,
        resets: Sequence[Mapping[str, Any]] = ({},),
        max_steps: int | None = None,
        reward: Combine = "sum",
        reward_range: tuple[float, float] = (0.0, 1.0),
        instructions: str = INSTRUCTIONS,
        timeout: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"an OpenEnv environment is named by the URL of its server, not {url!r:.200}")
        if reward not in get_args(Combine):
            raise UsageError(f"reward must be {' or '.join(get_args(Combine))}, not {reward!r}")
        if max_steps is not None and max_steps < 1:
            raise UsageError(f"max_steps must be at least 1, not {max_steps!r}")
        self.name = f"openenv:{url}"
        self.url = url.rstrip("/")
        self.reward_range = read_reward_range(reward_range)
        self.max_steps = max_steps
        self._resets = [dict(reset) for reset in resets]
        self._combine = reward
        self._instructions = instructions
        self._timeout = timeout

    def tasks(self) -> list[Task]:
        return [Task(id=f"reset-{n}", data={"reset": reset}) for n, reset in enumerate(self._resets)]

    async def run(self, ctx: Context) -> None:
        rewards: list[float] = []
        ctx.state["score"] = self._get_score(rewards)
        async with self._connect() as (connection, schema):
            tools = await self._list_tools(connection, schema)
            result = await connection.ask("reset", _get_reset(ctx.task))
            messages = (
                [] if tools else [Message("system", self._instructions.replace("{schema}", json.dumps(schema)))]
            )
            messages += [*ctx.task.prompt, Message("user", _show(result))]
            while not result.get("done"):
                reply = await ctx.policy.chat(messages, tools=tools)
                messages.append(reply.message)
                if tools and not reply.message.tool_calls:
                    break  # the policy has answered
                for action, call in parse_actions(reply.message, schema):
                    taken, text = await self._step(connection, ctx, action)
                    messages.append(Message("tool", text, tool_call_id=call) if call else Message("user", text))
                    if taken is None:
                        continue
                    result = taken
                    rewards.append(float(result.get("reward") or 0.0))
                    ctx.state["score"] = self._get_score(rewards)
                    if result.get("done") or len(rewards) == self.max_steps:
                        return

    async def _step(
        self, connection: OpenEnvConnection, ctx: Context, action: "dict[str, Any] | ActionError"
    ) -> tuple[dict[str, Any] | None, str]:
        """Take an action. Return the server's result, or None if it is invalid, and the text for the policy."""
        try:
            if isinstance(action, ActionError):
                raise action
            result = await ctx.charge_policy("tool", connection.ask("step", action))
        except ActionError as error:
            return None, f"This is not a valid action: {error}"
        return result, _show(result)

    def _get_score(self, rewards: list[float]) -> Score:
        total = sum(rewards) if self._combine == "sum" else (rewards or [0.0])[-1]
        return Score(float(total), metrics={"steps": float(len(rewards))})

    async def _list_tools(self, connection: OpenEnvConnection, schema: Mapping[str, Any]) -> list[ToolSchema]:
        if schema.get("title") not in GENERIC:
            return []
        found = (await connection.ask("step", {"type": "list_tools"}))["observation"].get("tools") or []
        return [ToolSchema(tool["name"], tool["description"], tool["input_schema"]) for tool in found]

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[tuple[OpenEnvConnection, dict[str, Any]]]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            try:
                async with asyncio.timeout(self._timeout), http.get(f"{self.url}/schema") as response:
                    response.raise_for_status()
                    schema: dict[str, Any] = (await response.json())["action"]
                async with asyncio.timeout(self._timeout):
                    socket = await http.ws_connect(
                        f"{self.url}/ws", heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE, autoping=True
                    )
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
                raise RookeryError(
                    f"the OpenEnv server {self.url} cannot be used: {describe(error)}", cause=UNREACHABLE
                ) from error
            try:
                yield OpenEnvConnection(socket, self.url, self._timeout), schema
            finally:
                await socket.close()  # the server destroys the session of a closed connection


def _get_reset(task: Task) -> dict[str, Any]:
    reset = task.data.get("reset", {})
    if not isinstance(reset, dict):
        raise UsageError(f"task {task.id}: `reset` must be an object, not {reset!r:.80}", cause="task.invalid")
    return reset


def _show(result: Mapping[str, Any]) -> str:
    """Return what the policy reads of an observation: its fields as JSON, without its metadata."""
    observation = result.get("observation")
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
    return json.dumps(observation, ensure_ascii=False)


def parse_actions(
    message: Message, schema: Mapping[str, Any]
) -> list[tuple["dict[str, Any] | ActionError", str | None]]:
    """Return the actions of a reply with the IDs of their tool calls, or errors for those that are not valid.

    Without tool calls the reply is one action: JSON, JSON in a code block, or text if the schema requires one
    field.
    """
    if message.tool_calls:
        return [(_parse_call(call.name, call.arguments), call.id) for call in message.tool_calls]
    text = message.text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    try:
        action = json.loads(text)
    except (ValueError, RecursionError):
        action = text
    if isinstance(action, dict):
        return [(action, None)]
    required = schema.get("required", [])
    if len(required) != 1:
        return [(ActionError("reply with one JSON object"), None)]
    return [({required[0]: action}, None)]


def _parse_call(name: str, arguments: str) -> "dict[str, Any] | ActionError":
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return ActionError(f"the arguments are not valid JSON: {error}")
    return {"type": "call_tool", "tool_name": name, "arguments": parsed}
