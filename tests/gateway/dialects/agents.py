"""Requests as Claude Code 2.1 and Codex 0.166 send them, built by hand after what they were seen to send."""

import json
from typing import Any


def schema(*names: str) -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {name: {"type": "string", "description": f"The {name}."} for name in names},
        "required": list(names[:1]),
        "additionalProperties": False,
    }


NAMES = (
    "Agent", "AskUserQuestion", "Bash", "CronCreate", "CronDelete", "CronList", "Edit", "EnterPlanMode",
    "EnterWorktree", "ExitPlanMode", "ExitWorktree", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "TaskCreate",
    "TaskGet", "TaskList", "TaskOutput", "TaskStop", "TaskUpdate", "WebFetch", "Write",
)  # fmt: skip
CLAUDE_TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name}: " + "what it does, at length. " * 60,
        "input_schema": schema("command", "path"),
    }
    for name in NAMES
]
HEADERS = {
    "anthropic_version": "2023-06-01",
    "anthropic_beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "X_Claude_Code_Session_Id": "6f0c1f1e-0000-4000-8000-000000000000",
    "x_app": "cli",
    "x_stainless_retry_count": "0",
    "x_stainless_lang": "js",
    "User_Agent": "claude-cli/2.1.0 (external, cli)",
}


def claude_code(
    messages: list[dict[str, Any]], turn: int, *, system: str = "You are an agent.", tools: int = 24
) -> bytes:
    """The body of one turn. The bill changes, the cache hint is on the last block only, as it does."""
    plain: list[dict[str, Any]] = json.loads(json.dumps(messages))
    last = plain[-1]
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"][-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    body = {
        "model": "claude-opus-4-7",
        "messages": plain,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={turn:05x};",
            },
            {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}},
            {
                "type": "text",
                "text": "# How to work\n" + "Be careful. " * 500,
                "cache_control": {"type": "ephemeral"},
            },
        ],
        "tools": CLAUDE_TOOLS[:tools],
        "metadata": {"user_id": "user_0_account__session_0"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    return json.dumps(body).encode()


REMINDER = {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-01.\n</system-reminder>\n"}

CODEX_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
        "parameters": schema("cmd", "workdir"),
    },
    {"type": "function", "name": "update_plan", "description": "", "strict": False, "parameters": schema("plan")},
    {
        "type": "custom", "name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
    },
    {
        "type": "namespace", "name": "mcp__docs", "description": "Documents.",
        "tools": [{"type": "function", "name": "search", "description": "", "parameters": schema("query")}],
    },
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text"]},
    {"type": "image_generation", "output_format": "png"},
]  # fmt: skip
CODEX_HEADERS = {
    "session_id": "019a0000-0000-7000-8000-000000000000",
    "thread_id": "019a0000-0000-7000-8000-000000000000",
    "originator": "codex_exec",
    "User_Agent": "codex_exec/0.166.0",
    "Accept": "text/event-stream",
}


def codex(items: list[dict[str, Any]], **more: Any) -> bytes:
    """The body of one turn: everything again, nothing kept."""
    body = {
        "model": "gpt-5.5-codex",
        "instructions": "You are a coding agent. " * 300,
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a0000-0000-7000-8000-000000000000",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "0"},
        **more,
    }
    return json.dumps(body).encode()


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
