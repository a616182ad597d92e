"""Run environments of other systems with scripted replies."""

import json
from pathlib import Path
from typing import Any

from rookery import Engine
from rookery.core import Rollout
from rookery.environments import Environment
from tests.servers import Answer, ModelServer, Request


async def run_environment(
    env: Environment, server: ModelServer, folder: Path, **options: Any
) -> dict[str, list[Rollout]]:
    """Run the environment's tasks once, and return the rollouts by the ID of their task."""
    options = {"runners": 0, "record": "plain", "breaker": None, "retry": {"attempts": 1}, **options}
    k = options.pop("k", 1)
    async with Engine(env, policy=f"{server.url}/v1", model="test-model", out=folder, **options) as engine:
        return {group.task.id: group.rollouts async for group in engine.groups(k=k)}


def last_user_text(body: dict[str, Any]) -> str:
    """Return the text of the last user message of a request."""
    content = next(message["content"] for message in reversed(body["messages"]) if message["role"] == "user")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def as_stream(answer: Answer, request: Request) -> Answer:
    """Return the answer as server-sent events if the request asks for a stream."""
    if not request.body.get("stream"):
        return answer
    completion = answer.completion(chat=True)
    (choice,) = completion["choices"]
    delta = choice.pop("message")
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    head = {**completion, "object": "chat.completion.chunk"}
    usage = {"usage": {**completion["usage"], "total_tokens": 6}}
    events = [
        {**head, "usage": None, "choices": [{**choice, "delta": delta, "finish_reason": None}]},
        {**head, "usage": None, "choices": [{**choice, "delta": {}}]},
        {**head, **usage, "choices": []},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return Answer(body=text.encode(), headers={"Content-Type": "text/event-stream"})
