"""Episodes of verifiers, made from rollouts: a graph of messages with the token IDs of every reply."""

import hashlib
import json
import uuid
from typing import Any, Final

from rookery import __version__
from rookery.adapters.rollout_service import FinishedRollout
from rookery.core import Failed, Message, Truncated, Turn, label

STOP_CONDITIONS: Final = {"turns": "max_turns", "tokens": "max_output_tokens", "context": "max_total_tokens"}
"""verifiers' names for the reasons of `Truncated`. Its `is_truncated` recognises only these."""


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
