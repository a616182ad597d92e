"""Verify responses of NeMo Gym, made from rollouts: items of the Responses API with token IDs."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from rookery.adapters.rollout_service import FinishedRollout, TurnTokens
from rookery.core import Cancelled, Failed, Message, RookeryError, label
from rookery.gateway.dialects.responses_items import RequestTools, call_item, message_item
from rookery.gateway.http_messages import HttpError


class ContiguityError(RookeryError):
    """A prompt of an output item does not start with the tokens before it, so NeMo RL would refuse the rollout."""


def refuse(status: int, text: str, cause: str = "") -> HttpError:
    """Return the error that answers a request with this status. NeMo RL repeats the row if it is 5xx or 429."""
    return HttpError(status, msgspec.json.encode({"error": {"message": text, "cause": cause}}))


def make_response(finished: FinishedRollout, params: dict[str, Any]) -> dict[str, Any]:
    """Return Gym's verify response for a rollout. Raise `HttpError` for a rollout that has no reward."""
    rollout = finished.rollout
    if not rollout.valid:
        missing = isinstance(rollout.outcome, Cancelled) or (
            isinstance(rollout.outcome, Failed) and rollout.outcome.fault == "infra"
        )
        if isinstance(rollout.outcome, Failed):
            detail = rollout.outcome.detail
        elif rollout.ungraded:
            detail = f"rollout {rollout.id} has no reward, because nothing graded it: add a scorer (--scorer NAME)"
        else:
            detail = "the rollout was cancelled"
        raise refuse(503 if missing else 422, detail, "ungraded" if rollout.ungraded else label(rollout.outcome))
    segment = max(rollout.segments, key=lambda one: one.trained, default=None)
    if segment is None or not segment.trained:
        raise refuse(422, f"rollout {rollout.id} has no trained tokens, which NeMo RL does not accept")
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


def format_reply(message: Message) -> list[dict[str, Any]]:
    """Return a reply as items of the Responses API. The last one gets the tokens of the whole reply."""
    stem = uuid.uuid4().hex
    items = [message_item(stem, 0, message.text)] if message.text or not message.tool_calls else []
    return items + [call_item(stem, at, call, RequestTools()) for at, call in enumerate(message.tool_calls)]


def format_input(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"type": "function_call_output", "call_id": message.tool_call_id or "", "output": message.text}
    return {"type": "message", "role": message.role, "content": message.text}
