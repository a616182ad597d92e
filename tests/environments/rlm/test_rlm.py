"""The `rlm` environment from end to end."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Failed, Truncated, UsageError
from rookery.environments.rlm import RlmEnvironment
from rookery.environments.tools import tool
from tests.environments.rlm.helpers import (
    Models,
    count_replies,
    read_turns,
    run_rollout,
    run_tasks,
    segments_by_role,
    trains_each_reply_once,
)
from tests.servers import Answer
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("mount")
TEXT = "abc " * 1000
TASK: dict[str, Any] = {"id": "t", "prompt": "How long is the context?", "context": TEXT, "answer": 4000}


async def test_context_is_in_the_repl_and_in_no_prompt(tmp_path: Path) -> None:
    models = Models(["<code>len(context)", "<code>answer(len(context))"])
    rollout = await run_rollout(models, tmp_path, TASK)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    assert models.observations[0].startswith("<result>\n4000\n[left: 500 ")
    prompts = [str(request.body["messages"]) for request in models.server.requests]
    assert all("abc abc" not in prompt and "4,000 bytes" in prompt for prompt in prompts)


async def test_context_may_be_text_json_a_file_or_a_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes("héllo\r\n".encode())
    (tmp_path / "data.json").write_text('{"x": 3}')
    (tmp_path / "raw.bin").write_bytes(b"\x00\xff")
    (tmp_path / "docs").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "docs" / name).write_text(name)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"context": {"a": [1, 2]}}, "context['a']", "[1, 2]"),
        ({"context": [{"b": 1}]}, "context", "[{'b': 1}]"),
        ({"context_file": str(tmp_path / "notes.txt")}, "context", "'héllo\\r\\n'"),
        ({"context_file": str(tmp_path / "data.json")}, "context['x']", "3"),
        ({"context_file": str(tmp_path / "raw.bin")}, "context", "b'\\x00\\xff'"),
        (
            {"context_folder": str(tmp_path / "docs")},
            "sorted(p.name for p in context.iterdir())",
            "['a.txt', 'b.txt']",
        ),
        ({}, "print(context)", "None"),
    ]
    observations: dict[str, str] = {}

    def root(messages: list[dict[str, Any]]) -> str:
        cell = messages[1]["content"]
        if not count_replies(messages):
            return f"<code>{cell}"
        observations[cell] = observations.get(cell, "") + messages[-1]["content"].split("\n")[1]
        return "1"

    tasks = [
        {"id": str(at), "prompt": f"{cell}#{at}", "answer": 1, **row} for at, (row, cell, _) in enumerate(cases)
    ]
    groups = await run_tasks(Models(root), tmp_path, tasks)
    assert [group.rollouts[0].reward for group in groups] == [1.0] * len(cases)
    assert observations == {f"{cell}#{at}": value for at, (_, cell, value) in enumerate(cases)}


async def test_invalid_context_is_the_tasks_fault(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"context": 7}, "context"),
        ({"context": "a", "context_file": "b"}, "context_file"),
        ({"context_file": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"recipe": {"kind": "needle", "seed": 1, "size": 5}}, "recipe"),
        ({"answer": None}, "data.answer"),
    ]
    tasks = [{"id": str(at), "prompt": "?", "answer": 1, **row} for at, (row, _) in enumerate(cases)]
    for group, (_, field) in zip(await run_tasks(Models(["never"]), tmp_path, tasks), cases, strict=True):
        outcome = group.rollouts[0].outcome
        assert isinstance(outcome, Failed)
        assert outcome.cause == "task.invalid"
        assert field in outcome.detail


async def test_sub_calls_are_recorded_as_branches_of_the_policy(tmp_path: Path) -> None:
    models = Models(
        ["<code>x = llm('one', system='be brief')", "<code>print(llm_batch(['two', 'three', 'two']))", "4000"],
        lambda messages: f"reply to {messages[-1]['content']}",
    )
    rollout = await run_rollout(models, tmp_path, TASK)
    assert rollout.reward == 1.0
    assert "['reply to two', 'reply to three', 'reply to two']" in models.observations[1]
    turns = read_turns(tmp_path, rollout)
    assert {turn.role for turn in turns} == {"policy"}
    # The root's three turns are one sequence. Equal sub-calls are equal prompts, but each answer trains.
    assert sorted(len(segment.turns) for segment in rollout.segments) == [1, 1, 1, 1, 3]
    assert trains_each_reply_once(models, rollout.segments)


async def test_untrained_sub_calls_have_the_role_sub(tmp_path: Path) -> None:
    models = Models(["<code>llm_batch(['a', 'b'])", "4000"], lambda messages: messages[-1]["content"] * 3)
    rollout = await run_rollout(models, tmp_path, TASK, train_sub=False)
    turns = read_turns(tmp_path, rollout)
    found = segments_by_role(turns)
    assert {role: sum(len(run_rollout.turns) for run_rollout in parts) for role, parts in found.items()} == {
        "policy": 2,
        "sub": 2,
    }
    assert trains_each_reply_once(models, [segment for parts in found.values() for segment in parts])
    assert rollout.segments == found["policy"]
    assert rollout.usage.others == {"sub": 8}
    assert rollout.usage.turns == 2


async def test_turn_limit_counts_the_roots_turns_only(tmp_path: Path) -> None:
    models = Models(lambda _: "<code>_ = llm_batch(['x'] * 10)")
    rollout = await run_rollout(models, tmp_path, TASK, max_turns=3)
    assert rollout.outcome == Truncated("turns")
    assert rollout.usage.turns == 33


async def test_root_tools_are_functions_in_the_repl(tmp_path: Path) -> None:
    @tool
    async def lookup(name: str, top: int = 1) -> dict[str, Any]:
        """Looks something up."""
        return {"name": name, "top": top}

    @tool
    def broken() -> str:
        """Fails."""
        raise ValueError("not today")

    models = Models(
        [
            "<code>lookup('a', top=2)['top']",
            "<code>lookup(top='many')",
            "<code>lookup('a', 1, 2)",
            "<code>broken()",
            "<code>answer(lookup('z')['name'])",
        ]
    )
    rollout = await run_rollout(models, tmp_path, {**TASK, "answer": "z"}, tools=[lookup, broken])
    assert rollout.reward == 1.0
    assert models.observations[0].startswith("<result>\n2\n")
    assert re.search(r"\bname\b", models.observations[1])
    assert re.search(r"\b2\b", models.observations[2])
    assert "ValueError: not today" in models.observations[3]
    assert "lookup(name, top): Looks something up." in str(models.server.requests[0].body["messages"][0])


async def test_sub_models_may_use_tools(tmp_path: Path) -> None:
    @tool
    async def double(n: int) -> int:
        """Doubles."""
        return 2 * n

    def sub(messages: list[dict[str, Any]]) -> Answer:
        if messages[-1]["role"] == "tool":
            return Answer(f"it is {messages[-1]['content']}")
        return Answer("", calls=[("double", '{"n": 21}')], finish="tool_calls")

    models = Models(["<code>llm('twice 21?')", "4000"], sub)
    rollout = await run_rollout(models, tmp_path, TASK, sub_tools=[double])
    assert models.observations[0].startswith("<result>\n'it is 42'\n")
    assert rollout.metrics["sub_calls"] == 2


async def test_output_is_cut_to_a_number_of_characters(tmp_path: Path) -> None:
    models = Models(["<code>print('é' * 20_000)", "4000"])
    await run_rollout(models, tmp_path, TASK)
    head, cut, tail = models.observations[0].split("\n")[1:4]
    assert (len(head), len(tail)) == (4096, 4096)
    assert re.fullmatch(r"… 11,808 .*…", cut)


@pytest.mark.long
async def test_answer_counts_even_if_its_cell_fails_afterwards(tmp_path: Path) -> None:
    models = Models(["<code>answer(4000)\nraise SystemExit(3)"])
    assert (await run_rollout(models, tmp_path, TASK)).reward == 1.0
    models = Models(["<code>answer(4000)\nimport time; time.sleep(600)"])
    rollout = await run_rollout(models, tmp_path / "late", TASK, cell_seconds=8.0, end_on_timeout=True)
    assert (rollout.outcome, rollout.reward) == (Truncated("time"), 1.0)


async def test_cells_may_be_tool_calls(tmp_path: Path) -> None:
    models = Models(
        [
            Answer("", calls=[("repl", '{"code": "len(context)"}')], finish="tool_calls"),
            Answer("", calls=[("repl", "{"), ("other", "{}")], finish="tool_calls"),
            "4000",
        ]
    )
    rollout = await run_rollout(models, tmp_path, TASK, style="tool")
    assert rollout.reward == 1.0
    assert models.observations[0].startswith("4000\n[left: ")
    assert "'other'" in models.observations[1]


# ---- near the end of the context


def reply_at_length(messages: list[dict[str, Any]]) -> str:
    done = count_replies(messages)
    seen = "shortened" in str(messages) or "dropped" in str(messages)
    if "Write no cell now" in messages[-1]["content"]:
        return "I know that n is 4000."
    return "4000" if done >= 8 or (seen and done >= 1) else f"<code>print('{done}' * 900)"


@pytest.mark.long
@pytest.mark.parametrize("compaction", ["none", "drop", "summary"])
async def test_history_is_shortened_as_a_fork_and_each_token_trains_once(tmp_path: Path, compaction: str) -> None:
    models = Models(reply_at_length)
    rollout = await run_rollout(models, tmp_path, TASK, compaction=compaction, context_tokens=6000)
    assert rollout.reward == 1.0
    assert "[warning: " in str(models.server.requests[-2].body["messages"]) or compaction != "none"
    assert (rollout.metrics["compactions"] > 0) == (compaction != "none")
    assert (len(rollout.segments) > 1) == (compaction != "none")
    assert trains_each_reply_once(models, rollout.segments)
    if compaction == "summary":
        assert "n is 4000" in models.server.requests[-1].body["messages"][2]["content"]


def test_invalid_options_are_refused_at_construction() -> None:
    for wrong, name in (
        ({"repl": "perl"}, "repl"),
        ({"max_calls": -1}, "max_calls"),
        ({"sub_timeout": float("nan")}, "sub_timeout"),
        ({"depth": 1}, "depth"),
        ({"kinds": ["haystack"]}, "kinds"),
        ({"megabytes": 5000}, "megabytes"),
    ):
        with pytest.raises(UsageError, match=name):
            RlmEnvironment(**wrong)

    async def llm(x: int) -> int:
        return x

    with pytest.raises(UsageError, match="llm"):
        RlmEnvironment([llm])
    assert [schema.name for schema in RlmEnvironment(style="tool").tools()] == ["repl"]


async def test_cancelling_the_rollout_cancels_its_sub_calls(tmp_path: Path) -> None:
    never = asyncio.Event()
    models = Models(["<code>llm_batch(['a', 'b', 'c'])"], lambda _: Answer("late", hold=never))
    playing = asyncio.create_task(run_rollout(models, tmp_path, TASK))
    await wait_until(lambda: len(models.subs) == 3)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert models.server.disconnects == 3
