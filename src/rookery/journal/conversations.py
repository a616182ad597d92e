"""Conversations of rollouts in the formats of other programs: OpenAI's messages, ShareGPT, and ATIF trajectories.

- A conversation is a path through the policy's turns, from the first turn to a reply that no other turn continues.
  A rollout has several if the policy made sub-calls or if its history was edited.
- `openai` and `sharegpt` have one row per conversation. Failed and cancelled rollouts are left out.
- Every format has the tools that a conversation offered to the model. `atif` and `openai` also have its images.
- `atif` has one trajectory per rollout, of version 1.7 of the Agent Trajectory Interchange Format. Its steps are
  the latest conversation. The other conversations are its sub-agent trajectories, in which steps that were already
  in an earlier conversation are marked as copied.
- The first conversation is that of `rookery.trajectories.build_transcript`.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

import rookery
from rookery.core import Message, Rollout, ToolCall, ToolSchema, Turn
from rookery.journal.atif_content import ConversationImages, format_content
from rookery.trajectories import get_continued_response
from rookery.trajectories.segments import trim_partial_turns

ATIF_VERSION: Final = "ATIF-v1.7"
_SPEAKERS: Final = {"user": "human", "assistant": "gpt", "tool": "observation", "developer": "system"}


def find_conversations(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the conversations of the policy as paths of turns, the latest one first."""
    own = {turn.index: turn for turn in turns if turn.role == "policy"}
    kept = {turn.index: turn for turn in trim_partial_turns(list(own.values()))} or own
    continued = {turn.parent for turn in kept.values()}
    found = []
    for index in sorted(kept.keys() - continued, reverse=True):
        path = [kept[index]]
        while path[-1].parent is not None and path[-1].parent in own:
            path.append(own[path[-1].parent])
        found.append(path[::-1])
    return found


def list_messages(path: Sequence[Turn]) -> list[Message]:
    """Return the messages of a conversation."""
    return [
        message
        for turn, following in zip(path, (*path[1:], None), strict=True)
        for message in (*turn.messages, get_continued_response(turn, following))
    ]


def find_tools(turns: Sequence[Turn], path: Sequence[Turn]) -> tuple[ToolSchema, ...]:
    """Return the tools that a conversation offered to the model. Only the first turn with them records them."""
    if not path:
        return ()
    role, scope = path[0].role, path[0].scope
    return next((one.tools for one in turns if one.tools and (one.role, one.scope) == (role, scope)), ())


def format_tool(tool: ToolSchema) -> dict[str, Any]:
    """Return a tool as in OpenAI's chat completions."""
    return {"type": "function", "function": msgspec.structs.asdict(tool)}


def make_openai_rows(record: Rollout, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Yield a rollout's conversations as `messages` in the format of OpenAI's chat completions."""
    for number, path in enumerate(find_conversations(turns)):
        tools = [format_tool(tool) for tool in find_tools(turns, path)]
        messages = [format_openai(one) for one in list_messages(path)]
        yield {"messages": messages, **({"tools": tools} if tools else {}), **_describe(record, number)}


def make_sharegpt_rows(record: Rollout, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Yield a rollout's conversations as `conversations` in the format of ShareGPT.

    A reply with tool calls becomes its text, if it has any, and one `function_call` for each call.
    """
    for number, path in enumerate(find_conversations(turns)):
        values: list[dict[str, str]] = []
        for message in list_messages(path):
            if message.text or not message.tool_calls:
                values.append({"from": _SPEAKERS.get(message.role, message.role), "value": message.text})
            for call in message.tool_calls:
                value = json.dumps({"name": call.name, "arguments": _parse_arguments(call)}, ensure_ascii=False)
                values.append({"from": "function_call", "value": value})
        tools = [msgspec.structs.asdict(tool) for tool in find_tools(turns, path)]
        more = {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}  # the format has text here
        yield {"conversations": values, **more, **_describe(record, number)}


def format_openai(message: Message) -> dict[str, Any]:
    """Return a message as in OpenAI's chat completions."""
    found: dict[str, Any] = {"role": message.role, "content": msgspec.to_builtins(message.content)}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def _describe(record: Rollout, number: int) -> dict[str, Any]:
    return {"id": f"r{record.id}", "conversation": number, "task": record.task, "reward": record.reward}


def make_trajectory(
    record: Rollout,
    turns: Sequence[Turn],
    *,
    run: dict[str, Any],
    tokens: bool = False,
    images: ConversationImages | None = None,
) -> dict[str, Any]:
    """Return a rollout as an ATIF trajectory. `tokens` adds token IDs and log probabilities to its steps.

    `run` contains the facts of `rookery.journal.export.run_facts`. `images` stores the images of messages; without
    it, they stay in data URLs.
    """
    images = images or ConversationImages(None)
    paths = find_conversations(turns)
    agent = {"name": run["environment"] or "rookery", "version": rookery.__version__, "model_name": run["model"]}
    seen: set[int] = set()
    found = []
    for number, path in enumerate(paths):
        steps = _make_steps(path, seen, images, tokens=tokens)
        seen.update(turn.index for turn in path)
        name = f"{run['name']}/r{record.id}" + (f"/{number}" if number else "")
        tools = [format_tool(tool) for tool in find_tools(turns, path)]
        who = {**agent, "tool_definitions": tools} if tools else agent
        found.append({"schema_version": ATIF_VERSION, "trajectory_id": name, "agent": who, "steps": steps})
    if not found:  # the format requires a step
        step = {"step_id": 1, "source": "system", "message": "this rollout has no model call"}
        empty = {"schema_version": ATIF_VERSION, "trajectory_id": f"{run['name']}/r{record.id}", "agent": agent}
        found = [{**empty, "steps": [step]}]
    main = found[0]
    main["session_id"] = run["name"]
    main["final_metrics"] = {
        "total_prompt_tokens": record.usage.prompt_tokens,
        "total_completion_tokens": record.usage.sampled_tokens,
        "total_steps": len(main["steps"]),
    }
    main["extra"] = {
        "rollout": f"r{record.id}",
        "task": record.task,
        "outcome": msgspec.to_builtins(record.outcome),
        "reward": record.reward,
        "rewards": record.rewards,
        "metrics": record.metrics,
    }
    if len(found) > 1:
        main["subagent_trajectories"] = found[1:]
    return main


def _make_steps(
    path: Sequence[Turn], seen: set[int], images: ConversationImages, *, tokens: bool
) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    before: list[int] = []
    for turn, following in zip(path, (*path[1:], None), strict=True):
        copied = {"is_copied_context": True} if turn.index in seen else {}
        _add_inputs(steps, turn.messages, copied, images)
        prompt = before[: turn.prefix] + _unpack(turn.prompt, "i")
        sampled = _unpack(turn.sampled, "i")
        before = prompt + sampled
        message = get_continued_response(turn, following)
        metrics: dict[str, Any] = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.sampled_tokens}
        if tokens and sampled:
            metrics |= {"prompt_token_ids": prompt, "completion_token_ids": sampled}
            metrics |= {"logprobs": _unpack(turn.logprobs, "f")} if turn.logprobs else {}
        content, extra = _format_message(message, images)
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": "agent", "message": content}
        if turn.started:
            step["timestamp"] = datetime.fromtimestamp(turn.started, UTC).isoformat()
        if message.reasoning:
            step["reasoning_content"] = message.reasoning
        if message.tool_calls:
            step["tool_calls"] = [_format_call(call) for call in message.tool_calls]
        extra |= {"turn": turn.index, "finish": turn.finish, "policy_version": turn.version}
        steps.append({**step, "metrics": metrics, "llm_call_count": 1, "extra": extra, **copied})
    return steps


def _add_inputs(
    steps: list[dict[str, Any]], messages: Sequence[Message], copied: dict[str, bool], images: ConversationImages
) -> None:
    """Add the messages before a reply: results of tools to the step that called them, others as steps."""
    last = steps[-1] if steps else {}
    calls = {call["tool_call_id"] for call in last.get("tool_calls", ())}
    for message in messages:
        content, extra = _format_message(message, images)
        is_result = message.role == "tool" and message.tool_call_id in calls and steps[-1] is last
        if is_result and not extra:  # results have no `extra`
            results = last.setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": message.tool_call_id, "content": content})
            continue
        source = "system" if message.role in ("system", "developer") else "user"
        if message.role not in ("system", "user"):
            extra["role"] = message.role
        if message.tool_call_id is not None:
            extra["tool_call_id"] = message.tool_call_id
        found = {"step_id": len(steps) + 1, "source": source, "message": content, **copied}
        steps.append({**found, "extra": extra} if extra else found)


def _format_message(message: Message, images: ConversationImages) -> tuple[Any, dict[str, Any]]:
    """Return the content of a message in ATIF, and what the format does not have, for `extra`."""
    content, complete = format_content(message.content, images)
    extra: dict[str, Any] = {} if complete else {"content": msgspec.to_builtins(message.content)}
    return content, extra | ({"name": message.name} if message.name is not None else {})


def _format_call(call: ToolCall) -> dict[str, Any]:
    arguments = _parse_arguments(call)
    if isinstance(arguments, dict):
        return {"tool_call_id": call.id, "function_name": call.name, "arguments": arguments}
    # The format requires an object, but the policy may have sampled anything.
    extra = {"sampled_arguments": call.arguments}
    return {"tool_call_id": call.id, "function_name": call.name, "arguments": {}, "extra": extra}


def _parse_arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments


def _unpack(data: bytes, kind: str) -> list[Any]:
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))
