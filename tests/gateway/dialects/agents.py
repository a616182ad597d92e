"""Requests as Claude Code and Codex send them, for what was not recorded of them: answers with several calls,
tools of other kinds, arguments that are no JSON. All but their histories is as it was recorded."""

import json
from typing import Any

import msgspec

from tests.gateway.dialects.recordings import Exchange, conversations


def _first(client: str) -> Exchange:
    return conversations(client)["tool"][0]


def _headers(exchange: Exchange) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in exchange.headers.items() if value}


_CLAUDE, _CODEX = _first("claude-code"), _first("codex")
HEADERS, CODEX_HEADERS = _headers(_CLAUDE), _headers(_CODEX)


def claude_code(messages: list[dict[str, Any]], turn: int) -> bytes:
    """The body of one turn. The bill changes, the cache hint is on the last block only, as it does."""
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


def codex(items: list[dict[str, Any]], **more: Any) -> bytes:
    """The body of one turn: everything again, nothing kept. With other models its instructions stand apart."""
    own = {"instructions": "You write programs. " * 300, "tools": CODEX_TOOLS}
    return json.dumps({**_CODEX.body, **own, **more, "input": items}).encode()


def codex_message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def as_codex_keeps(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as Codex sends it back: without ids and states, its reasoning sealed."""
    kept = {name: value for name, value in item.items() if name not in ("id", "status")}
    if kept["type"] == "reasoning":
        kept.pop("content", None)
    if kept["type"] == "message":
        kept["content"] = [{"type": part["type"], "text": part["text"]} for part in kept["content"]]
    return kept


# ---- what they make of answers


def blocks(events: list[Any]) -> list[dict[str, Any]]:
    """A message as Claude Code puts it together; JavaScript writes a tool's input anew."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            found.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    found[-1]["text"] += delta["text"]
                case "thinking_delta":
                    found[-1]["thinking"] += delta["thinking"]
                case "signature_delta":
                    found[-1]["signature"] = delta["signature"]
                case _:
                    found[-1]["input"] = _javascript(msgspec.json.decode(delta["partial_json"]))
    return found


def _javascript(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _javascript(inner) for name, inner in value.items()}
    return value


def output(events: list[Any]) -> list[dict[str, Any]]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    return done
