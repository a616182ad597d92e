"""Requests in the form that Claude Code and Codex send, for cases that the recordings lack.

These are replies with several calls, tools of other kinds and arguments that are not JSON. Everything except the
history is taken from a recording.
"""

import json
from typing import Any

import msgspec

from tests.gateway.dialects.recordings import Exchange, load_conversations


def _first_exchange(client: str) -> Exchange:
    return load_conversations(client)["tool"][0]


def _headers(exchange: Exchange) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in exchange.headers.items() if value}


_CLAUDE, _CODEX = _first_exchange("claude-code"), _first_exchange("codex")
CLAUDE_HEADERS, CODEX_HEADERS = _headers(_CLAUDE), _headers(_CODEX)


def claude_code_body(messages: list[dict[str, Any]], turn: int) -> bytes:
    """Encode the request of one turn: the billing line changes and only the last block has a cache hint."""
    body, plain = json.loads(json.dumps([_CLAUDE.body, messages]))
    last = plain[-1]
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"][-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    body["system"][0]["text"] += f" cch={turn:05x};"
    return json.dumps(body | {"messages": plain}).encode()


REMINDER = {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-01.\n</system-reminder>\n"}

CODEX_TOOLS: list[dict[str, Any]] = [
    *_CODEX.body["tools"],
    {
        "type": "custom", "name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
    },
    {
        "type": "namespace", "name": "mcp__docs", "description": "Documents.",
        "tools": [
            {
                "type": "function", "name": "search", "description": "",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
            }
        ],
    },
    {"type": "image_generation", "output_format": "png"},
]  # fmt: skip


def codex_body(items: list[dict[str, Any]], **more: Any) -> bytes:
    """Encode the request of one turn, which resends the whole history with separate instructions."""
    own = {"instructions": "You write programs. " * 300, "tools": CODEX_TOOLS}
    return json.dumps({**_CODEX.body, **own, **more, "input": items}).encode()


def codex_message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def resend_codex_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an output item as Codex sends it back: without ID and status, reasoning only in encrypted form."""
    item_ = {name: value for name, value in item.items() if name not in ("id", "status")}
    if item_["type"] == "reasoning":
        item_.pop("content", None)
    if item_["type"] == "message":
        item_["content"] = [{"type": part["type"], "text": part["text"]} for part in item_["content"]]
    return item_


# ---- how the agents join streamed events


def join_blocks(events: list[Any]) -> list[dict[str, Any]]:
    """Join stream events into content blocks as Claude Code does; JavaScript re-encodes tool inputs."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
                case "signature_delta":
                    blocks[-1]["signature"] = delta["signature"]
                case _:
                    blocks[-1]["input"] = _as_javascript(msgspec.json.decode(delta["partial_json"]))
    return blocks


def _as_javascript(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _as_javascript(inner) for name, inner in value.items()}
    return value


def join_output_items(events: list[Any]) -> list[dict[str, Any]]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    return done
