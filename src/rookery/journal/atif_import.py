"""Import ATIF trajectories (Agent Trajectory Interchange Format, versions 1.x) as a run.

- There is one rollout per trajectory. Trajectories with the same task, in the files' order, are a group.
- A trajectory that Rookery exported with tokens has the same turns, segments, outcome and reward after its import.
- A trajectory of another program has the outcome `Completed`, and the reward in `extra.reward` or
  `final_metrics.extra.reward`; without one, it has no reward. Its task is `extra.task`, else its ID.
- Token IDs and log probabilities are imported where every token has both.
- An invalid file is refused before the run is created.
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import (
    Completed,
    Finish,
    Message,
    Outcome,
    Rollout,
    Task,
    ToolCall,
    ToolSchema,
    Turn,
    UsageError,
)
from rookery.core.errors import describe
from rookery.core.messages import Role, hash_tools
from rookery.core.records import Usage
from rookery.journal.atif_content import parse_content
from rookery.journal.folder import create_run
from rookery.journal.schema import TOKENS
from rookery.journal.store import Journal
from rookery.journal.tokens import TokenWriter, encode_turn

VERSIONS: Final = "ATIF-v1."
STREAM: Final = "import"
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Call(msgspec.Struct):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any] = {}
    extra: dict[str, Any] | None = None


class _Result(msgspec.Struct):
    source_call_id: str | None = None
    content: str | list[dict[str, Any]] | None = None


class _Observation(msgspec.Struct):
    results: list[_Result] = []


class _Metrics(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class _Step(msgspec.Struct):
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, Any]] = ""
    timestamp: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    extra: dict[str, Any] | None = None


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function


class _Agent(msgspec.Struct):
    name: str = ""
    model_name: str | None = None
    tool_definitions: list[_Tool] | None = None


class _FinalMetrics(msgspec.Struct):
    extra: dict[str, Any] | None = None


class _Trajectory(msgspec.Struct):
    schema_version: str
    steps: list[_Step]
    agent: _Agent = msgspec.field(default_factory=_Agent)
    trajectory_id: str | None = None
    session_id: str | None = None
    final_metrics: _FinalMetrics | None = None
    subagent_trajectories: "list[_Trajectory] | None" = None
    extra: dict[str, Any] | None = None

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        functions = (tool.function for tool in self.agent.tool_definitions or ())
        return tuple(ToolSchema(one.name, one.description or "", one.parameters or {}) for one in functions)


def import_atif(paths: Sequence[Path], root: Path) -> Path:
    """Write the trajectories of JSON and JSONL files as a new run in the directory `root`, and return its path."""
    found: list[_Trajectory] = []
    folders: dict[int, Path] = {}
    for path in paths:
        for one in read_trajectories(path):
            found.append(one)
            folders[id(one)] = path.parent
    # Invalid values are reported before the run is created.
    turns = {id(one): make_turns(one, folders[id(one)]) for one in found}
    if not found:
        raise UsageError(f"there is no trajectory in {', '.join(map(str, paths))}")
    groups: dict[str, list[_Trajectory]] = {}
    for number, one in enumerate(found):
        name = (one.extra or {}).get("task") or one.trajectory_id or one.session_id or f"trajectory-{number}"
        groups.setdefault(str(name), []).append(one)
    agent = found[0].agent
    folder = create_run(root, agent.name or STREAM, agent.model_name or "", now=datetime.now(UTC))
    with (
        Journal.create(folder, {}, env=agent.name, model=agent.model_name or "") as journal,
        TokenWriter(folder / TOKENS, STREAM) as writer,
    ):
        journal.add_tasks(
            [
                Task(id=name, prompt=_get_prompt(members[0], folders[id(members[0])]))
                for name, members in groups.items()
            ]
        )
        for group, (name, members) in enumerate(groups.items()):
            journal.add_group(group, stream=STREAM, position=group, task=group, k=len(members))
            for member, one in enumerate(members):
                journal.add_rollout(_make_rollout(one, turns[id(one)], group, member, name, writer))
            journal.set_group(group, "finished")
        writer.flush()
        journal.end("finished")
    return folder


def read_trajectories(path: Path) -> Iterator[_Trajectory]:
    """Yield the trajectories of a file: a JSON object, or one JSON object per line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        texts = [data] if isinstance(json.loads(data), dict) else []
    except (ValueError, RecursionError):
        texts = [line for line in data.splitlines() if line.strip()]
    for number, text in enumerate(texts, 1):
        try:
            one = msgspec.json.decode(text, type=_Trajectory)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"trajectory {number} of {path} is not valid ATIF: {error}") from error
        if not one.schema_version.startswith(VERSIONS):
            raise UsageError(
                f"trajectory {number} of {path} has version {one.schema_version!r:.80}: supported is {VERSIONS}x"
            )
        yield one


def _make_rollout(
    one: _Trajectory, turns: list[Turn], group: int, member: int, task: str, writer: TokenWriter
) -> Rollout:
    attempt = f"{group}.{member}.0"
    extra = one.extra or {}
    try:
        outcome: Outcome = msgspec.convert(extra["outcome"], Outcome)
    except (KeyError, msgspec.ValidationError):
        outcome = Completed()
    found = (extra.get("reward"), ((one.final_metrics and one.final_metrics.extra) or {}).get("reward"))
    reward = next((number for value in found if (number := _read_number(value)) is not None), None)
    return Rollout(
        id=f"{group}.{member}",
        group=group,
        member=member,
        task=task,
        outcome=outcome,
        reward=reward,
        rewards=_get_numbers(extra.get("rewards")),
        metrics=_get_numbers(extra.get("metrics")),
        info={"atif": {"version": one.schema_version, "trajectory": one.trajectory_id}},
        usage=Usage(
            turns=len(turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            sampled_tokens=sum(turn.sampled_tokens for turn in turns),
            tool_calls=sum(len(turn.response.tool_calls) for turn in turns),
            without_tokens=sum(not turn.sampled for turn in turns),
        ),
        tokens=tuple(writer.append(encode_turn(msgspec.structs.replace(turn, attempt=attempt))) for turn in turns),
    )


def _get_numbers(values: object) -> dict[str, float]:
    found = values if isinstance(values, dict) else {}
    return {str(name): number for name, value in found.items() if (number := _read_number(value)) is not None}


def _read_number(value: object) -> float | None:
    """Return a value as a finite number; None if it is not one."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def make_turns(one: _Trajectory, folder: Path) -> list[Turn]:
    """Return the model calls of a trajectory and of its sub-agents as turns, in order.

    `folder` is the directory of the trajectory, which also contains its images.
    """
    try:
        return _collect_turns(one, folder)
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise UsageError(f"trajectory {one.trajectory_id} has an invalid step: {describe(error)}") from error


def _collect_turns(one: _Trajectory, folder: Path) -> list[Turn]:
    parts = [*(one.subagent_trajectories or ()), one]
    known = [(step.extra or {}).get("turn") for part in parts for step in part.steps if step.source == "agent"]
    numbered = all(isinstance(index, int) and 0 <= index < 1 << 31 for index in known)  # Rookery's own export
    turns: dict[int, Turn] = {}
    contents: dict[int, list[int]] = {}
    """Prompt and sampled tokens of each turn."""
    for part in sorted(parts, key=lambda part: part is not one) if numbered else parts:
        parent: int | None = None
        messages: list[Message] = []
        tools = part.tools
        scope = hash_tools(tools)
        for step in part.steps:
            if step.source != "agent":
                messages.append(_make_input(step, folder))
                continue
            index = (step.extra or {})["turn"] if numbered else len(turns)
            if numbered and step.is_copied_context:
                if index not in turns:
                    raise ValueError(f"it copies turn {index}, which no conversation before it has")
                parent, messages = index, []
            elif step.is_copied_context:  # it was sampled in a conversation that is not here
                messages.append(_make_reply(step, folder))
            else:
                if index in turns or (parent is not None and parent >= index):  # readers rely on the order
                    raise ValueError(f"turn {index} comes after turn {parent}, or twice")
                before = contents.get(parent, []) if parent is not None else []
                turn, contents[index] = _make_turn(step, index, parent, messages, before, folder)
                if parent is None:
                    turn = msgspec.structs.replace(turn, scope=scope, tools=tools)
                turns[index] = turn
                parent, messages = index, []
            messages = [*messages, *_get_results(step, folder)]
    return _keep_first_tools([turns[index] for index in sorted(turns)])


def _keep_first_tools(turns: list[Turn]) -> list[Turn]:
    """Remove the tools from all turns but the first of each scope, as they are recorded."""
    seen: set[bytes] = set()
    kept = []
    for turn in turns:
        kept.append(msgspec.structs.replace(turn, tools=()) if turn.scope in seen else turn)
        if turn.parent is None:
            seen.add(turn.scope)
    return kept


def _make_turn(
    step: _Step, index: int, parent: int | None, messages: list[Message], before: list[int], folder: Path
) -> tuple[Turn, list[int]]:
    metrics = step.metrics or _Metrics()
    prompt, sampled = metrics.prompt_token_ids or [], metrics.completion_token_ids or []
    if not prompt or len(metrics.logprobs or ()) != len(sampled):
        prompt, sampled = [], []
    prefix = len(before) if before and prompt[: len(before)] == before else 0
    extra = step.extra or {}
    turn = Turn(
        attempt="",
        index=index,
        parent=parent,
        messages=tuple(messages),
        response=_make_reply(step, folder),
        prefix=prefix,
        prompt=struct.pack(f"<{len(prompt) - prefix}i", *prompt[prefix:]),
        sampled=struct.pack(f"<{len(sampled)}i", *sampled),
        logprobs=struct.pack(f"<{len(sampled)}f", *(metrics.logprobs or ())[: len(sampled)]),
        version=msgspec.convert(extra.get("policy_version", 0), Count, strict=False),
        finish=msgspec.convert(extra.get("finish", "tool_calls" if step.tool_calls else "stop"), Finish),
        prompt_tokens=metrics.prompt_tokens or len(prompt),
        sampled_tokens=metrics.completion_tokens or len(sampled),
        started=datetime.fromisoformat(step.timestamp).timestamp() if step.timestamp else 0.0,
    )
    return turn, prompt + sampled


def _make_input(step: _Step, folder: Path) -> Message:
    role: Role = "system" if step.source == "system" else "user"
    extra = step.extra or {}
    match extra.get("role"):  # written by Rookery's export
        case "tool" | "developer" | "assistant" as other:
            role = other
    call = extra.get("tool_call_id")
    return Message(
        role,
        _get_content(step, folder),
        tool_call_id=call if isinstance(call, str) else None,
        name=_get_name(step),
    )


def _get_content(step: _Step, folder: Path) -> str | tuple[dict[str, Any], ...]:
    """Return the content of a step's message. Rookery's export has parts that ATIF lacks in `extra`."""
    match (step.extra or {}).get("content"):
        case [*parts] if all(isinstance(part, dict) for part in parts):
            return tuple(parts)
    return parse_content(step.message, folder)


def _get_name(step: _Step) -> str | None:
    name = (step.extra or {}).get("name")
    return name if isinstance(name, str) else None


def _make_reply(step: _Step, folder: Path) -> Message:
    calls = tuple(
        ToolCall(
            call.tool_call_id,
            call.function_name,
            _get_sampled_arguments(call) or json.dumps(call.arguments, ensure_ascii=False),
        )
        for call in step.tool_calls or ()
    )
    content = _get_content(step, folder) or (None if calls else "")
    return Message("assistant", content, calls, name=_get_name(step), reasoning=step.reasoning_content)


def _get_sampled_arguments(call: _Call) -> str:
    found = (call.extra or {}).get("sampled_arguments")
    return found if isinstance(found, str) else ""


def _get_results(step: _Step, folder: Path) -> list[Message]:
    return [
        Message(
            "tool" if result.source_call_id is not None else "user",
            parse_content(result.content, folder),
            tool_call_id=result.source_call_id,
        )
        for result in (step.observation.results if step.observation is not None else ())
    ]


def _get_prompt(one: _Trajectory, folder: Path) -> tuple[Message, ...]:
    """Return the messages before the first reply."""
    return tuple(_make_input(step, folder) for step in takewhile(lambda step: step.source != "agent", one.steps))
