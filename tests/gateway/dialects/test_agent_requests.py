"""Requests of Claude Code and Codex that the recordings lack, over a real chat format and vocabulary.

What the agents do to their histories must not change any sampled token.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.upstreams.protocol import ModelRequest
from tests.gateway.chat_renderers.kit import open_family
from tests.gateway.dialects.agent_requests import (
    CLAUDE_HEADERS,
    CODEX_HEADERS,
    REMINDER,
    claude_code_body,
    codex_body,
    codex_message,
    join_blocks,
    join_output_items,
    resend_codex_item,
)
from tests.gateway.dialects.kit import check_exact_turns, post_stream, run_token_shard
from tests.gateway.kit import InProcessGateway, RegisteredSession
from tests.gateway.session_kit import RecordingUpstream, TokenScriptUpstream

pytestmark = pytest.mark.needs("tokenizers")


@asynccontextmanager
async def run_scripted_gateway(
    folder: Path, *texts: str
) -> AsyncIterator[tuple[InProcessGateway, RecordingUpstream, RegisteredSession]]:
    """Run a gateway whose model samples these texts, split into tokens at unusual places."""
    family, left = open_family("qwen3"), list(texts)

    def answer(_: ModelRequest) -> list[int]:
        text = left.pop(0)
        cut = len(text) // 3
        return [
            *family.tokenizer.encode(text[:cut]),
            *family.tokenizer.encode(text[cut:]),
            family.stop_token_ids[0],
        ]

    async with run_token_shard(folder, TokenScriptUpstream(answer, family), family) as (gateway, recording):
        yield gateway, recording, await gateway.register(id="agent")


CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls",   "timeout": 5.0}}\n</tool_call>'


@pytest.mark.parametrize("thinks", [True, False])
async def test_claude_code_conversation_becomes_one_segment(tmp_path: Path, thinks: bool) -> None:
    texts = (
        f"<think>\nI look.\n</think>\n\nLet me look.\n\n{CALL}\n{CALL}",
        f"<think>\nMore.\n</think>\n\n{CALL}",
        "<think>\nDone.\n</think>\n\nIt is done.",
        "A summary.",
    )
    async with run_scripted_gateway(tmp_path, *texts) as (gateway, recording, session):
        head = await gateway.request("HEAD", session.path, key=session.secret)
        assert head.status == 200

        async def ask(history: list[Any], turn: int) -> list[dict[str, Any]]:
            body = claude_code_body(history, turn)
            assert len(body) > 30_000
            events = await post_stream(gateway, session, "/v1/messages?beta=true", body, CLAUDE_HEADERS)
            blocks = join_blocks(events)
            return blocks if thinks else [block for block in blocks if block["type"] != "thinking"]

        main: list[Any] = [
            {"role": "user", "content": [REMINDER, {"type": "text", "text": "Fix it."}]},
            {"role": "system", "content": "The user prefers short answers."},
        ]
        for turn in (0, 1):
            answer = await ask(main, turn)
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "a.py"}]}
                for block in answer
                if block["type"] == "tool_use"
            ]
            assert len(results) == 2 - turn
            main += [{"role": "assistant", "content": answer}, {"role": "user", "content": [*results, REMINDER]}]
            main.append({"role": "system", "content": f"Turn {turn} is over."})
        main.append({"role": "assistant", "content": await ask(main, 2)})
        await ask([*main, {"role": "user", "content": "Summarise our conversation."}], 3)
        turns = await check_exact_turns(gateway, session, recording, segments=1)
        assert [turn.get("parent") for turn in turns] == [None, 0, 1, 2]
        assert all(turn.get("prefix") for turn in turns if turn.get("parent") is not None)
        assert turns[0]["response"]["tool_calls"][0]["arguments"] == '{"command": "ls",   "timeout": 5.0}'
        first = turns[0]["messages"]
        assert [message["role"] for message in first] == ["system", "user"]
        assert "billing" not in first[0]["content"]
        assert first[1]["content"].endswith("Fix it.\n<system>\nThe user prefers short answers.\n</system>")


async def test_arguments_that_are_not_json_extend_the_sampled_turn(tmp_path: Path) -> None:
    async with run_scripted_gateway(tmp_path, CALL.replace("5.0}}", "5.0,}}"), "Well.") as (
        gateway,
        recording,
        session,
    ):
        history: list[Any] = [{"role": "user", "content": "Go."}]
        events = await post_stream(gateway, session, "/messages", claude_code_body(history, 0), CLAUDE_HEADERS)
        history += [{"role": "assistant", "content": join_blocks(events)}, {"role": "user", "content": "And?"}]
        await post_stream(gateway, session, "/messages", claude_code_body(history, 1), CLAUDE_HEADERS)
        turns = await check_exact_turns(gateway, session, recording, segments=1)
        assert turns[1].get("prefix")


PATCH = (
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n*** End Patch"}}\n</tool_call>'
)
SEARCH = '<tool_call>\n{"name": "mcp__docs__search", "arguments": {"query":"x"}}\n</tool_call>'
EXEC = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": ["ls"],  "n": 1.0}}\n</tool_call>'
ODD = '<tool_call>\n{"name": "apply_patch", "arguments": {"patch": 1}}\n</tool_call>'


@pytest.mark.parametrize("thinks", [True, False])
async def test_codex_conversation_becomes_one_segment(tmp_path: Path, thinks: bool) -> None:
    texts = (
        f"<think>\nI look.\n</think>\n\nLet me look.\n{EXEC}\n{SEARCH}",
        f"<think>\nI patch.\n</think>\n\n{PATCH}\n{ODD}",
        "<think>\nDone.\n</think>\n\nIt is done.",
        "Welcome.",
    )
    async with run_scripted_gateway(tmp_path, *texts) as (gateway, recording, session):
        items: list[Any] = [
            codex_message("developer", "<permissions>All is allowed.</permissions>"),
            codex_message("user", "# AGENTS.md\nBe kind."),
            codex_message("user", "<environment_context>\n  <cwd>/w</cwd>\n</environment_context>"),
            codex_message("user", "Fix it."),
        ]
        kinds: list[list[str]] = []
        for turn in range(4):
            events = await post_stream(gateway, session, "/responses", codex_body(items), CODEX_HEADERS)
            output = join_output_items(events)
            kinds.append([item["type"] for item in output])
            kept = [resend_codex_item(item) for item in output]
            items += [item for item in kept if thinks or item["type"] != "reasoning"]
            for item in output:
                if item["type"] == "function_call":
                    output_text: Any = "Exit code: 0" if turn else [{"type": "input_text", "text": "Exit code: 0"}]
                    items.append(
                        {"type": "function_call_output", "call_id": item["call_id"], "output": output_text}
                    )
                if item["type"] == "custom_tool_call":
                    items.append(
                        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
                    )
            if turn == 0:
                assert output[-1] == {
                    "type": "function_call", "id": output[-1]["id"], "status": "completed", "name": "search",
                    "namespace": "mcp__docs", "call_id": output[-1]["call_id"], "arguments": '{"query":"x"}',
                }  # fmt: skip
            if turn == 1:
                inputs = [item["input"] for item in output if item["type"] == "custom_tool_call"]
                assert inputs == ["*** Begin Patch\n*** End Patch", '{"patch": 1}']
            if turn == 2:
                items.append(codex_message("user", "Thanks."))
        assert kinds == [
            ["reasoning", "message", "function_call", "function_call"],
            ["reasoning", "custom_tool_call", "custom_tool_call"],
            ["reasoning", "message"],
            ["message"],
        ]
        turns = await check_exact_turns(gateway, session, recording, segments=1)
        assert [turn.get("parent") for turn in turns] == [None, 0, 1, 2]
        assert [message["role"] for message in turns[0]["messages"]] == ["system", "user", "user", "user"]
        assert turns[0]["messages"][0]["content"].endswith("\n\n<permissions>All is allowed.</permissions>")


async def test_unknown_item_and_tool_types_are_accepted(tmp_path: Path) -> None:
    async with run_scripted_gateway(tmp_path, "One.", "Two.") as (gateway, recording, session):
        strange = [
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "q"},
            },
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-somebody-else"},
            {"type": "compaction", "encrypted_content": "sealed"},
            codex_message("user", "Go."),
        ]
        tools = [{"type": "of_tomorrow"}, {"type": "mcp", "server_label": "x", "server_url": "http://x"}]
        join_output_items(
            await post_stream(gateway, session, "/responses", codex_body(strange, tools=tools), CODEX_HEADERS)
        )
        body = msgspec.json.encode(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "of_tomorrow", "x": 1},
                            {"type": "text", "text": "Go.", "citations": None},
                        ],
                    },
                    {
                        "role": "assistant",
                        "content": [{"type": "server_tool_use", "id": "s", "name": "n", "input": {}}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "s"}]},
                ],
                "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
                "stream": True,
                "of_tomorrow": {"x": [1]},
            }
        )
        events = await post_stream(gateway, session, "/messages", body, {})
        assert events[-1]["type"] == "message_stop"
        turns = await check_exact_turns(gateway, session, recording)
        assert '{"type":"of_tomorrow","x":1}\nGo.' in turns[1]["messages"][0]["content"]
