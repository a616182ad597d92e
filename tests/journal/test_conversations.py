"""Conversations in the formats of other programs, and the import of ATIF trajectories."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_kit import record, record_with_tokens

from rookery.core import Completed, Failed, Message, Rollout, Segment, Task, ToolCall, ToolSchema, Turn, UsageError
from rookery.core.messages import hash_tools
from rookery.journal import Journal, RunReader, TokenWriter, atif_import, encode_turn, load_segments
from rookery.journal.atif_content import ConversationImages
from rookery.journal.atif_import import import_atif
from rookery.journal.conversations import make_trajectory
from rookery.journal.export import Conversations, export


def make_branches() -> list[Turn]:
    """Return turns with a sub-call (turn 1) and an edited history (turn 3 continues turn 0 instead of turn 2)."""

    def turn(index: int, parent: int | None, prompt: list[int], sampled: list[int], **more: Any) -> Turn:
        tokens = struct.pack(f"<{len(sampled)}i", *sampled)
        logprobs = struct.pack(f"<{len(sampled)}f", *[-0.5] * len(sampled))
        data = struct.pack(f"<{len(prompt)}i", *prompt)
        return Turn(
            attempt="0.0.0",
            index=index,
            parent=parent,
            prompt=data,
            sampled=tokens,
            logprobs=logprobs,
            prompt_tokens=more.get("prefix", 0) + len(prompt),
            **{"sampled_tokens": len(sampled), "version": index, **more},
        )

    call = Message("assistant", None, (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "no JSON")))
    results = (Message("tool", "2", tool_call_id="c1"), Message("tool", "wrong", tool_call_id="c2"))
    first = (Message("system", "Be brief."), Message("user", "1+1?"))
    return [
        turn(0, None, [1, 2], [3, 4], messages=first, response=call, finish="tool_calls"),
        turn(1, None, [9], [8], messages=(Message("user", "sub"),), response=Message("assistant", "part")),
        turn(2, 0, [5], [6], messages=results, response=Message("assistant", "3?"), prefix=4),
        turn(3, 0, [7], [10], messages=results, response=Message("assistant", "2", reasoning="hm"), prefix=4),
    ]


@pytest.fixture
def folder(run: Path) -> Path:
    with Journal.create(run, {}, env="sums", model="m") as journal:
        journal.add_tasks([Task(id="t0"), Task(id="t1"), Task(id="t2")])
        with TokenWriter(run / "tokens", "branches") as tokens:
            extents = tuple(tokens.append(encode_turn(turn)) for turn in make_branches())
        journal.add_rollout(record(0, 0, tokens=extents))
        journal.add_rollout(record_with_tokens(run, 1, 0))
        journal.add_rollout(record(2, 0, outcome=Failed("infra", "sandbox.lost", "gone", "run", "Traceback …")))
    return run


def write(folder: Path, kind: Conversations, out: Path, *, tokens: bool = False) -> list[dict[str, Any]]:
    with RunReader(folder) as reader:
        export(reader, out, kind=kind, tokens=tokens)
    return [json.loads(line) for line in out.read_text().splitlines()]


def read(folder: Path) -> list[tuple[Rollout, list[Segment]]]:
    with RunReader(folder) as reader:
        return [(one, load_segments(one, reader.tokens).segments) for one in reader.iter_rollouts()]


def test_openai_and_sharegpt_have_one_row_per_conversation(folder: Path, tmp_path: Path) -> None:
    rows = write(folder, "openai", tmp_path / "a.jsonl")
    assert [(row["id"], row["conversation"]) for row in rows] == [
        *(("r0.0", 0), ("r0.0", 1), ("r0.0", 2)),
        ("r1.0", 0),
    ]
    latest = rows[0]["messages"]
    assert [message["role"] for message in latest] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert latest[2]["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    assert (latest[3]["tool_call_id"], latest[-1]["reasoning_content"]) == ("c1", "hm")
    assert [row["messages"][-1]["content"] for row in rows[1:3]] == ["3?", "part"]
    values = write(folder, "sharegpt", tmp_path / "b.jsonl")[0]["conversations"]
    assert [one["from"] for one in values] == [
        *("system", "human", "function_call", "function_call", "observation", "observation", "gpt")
    ]
    assert json.loads(values[2]["value"]) == {"name": "add", "arguments": {"a": 1}}


def test_an_atif_trajectory_has_all_turns_and_can_be_imported_again(folder: Path, tmp_path: Path) -> None:
    rows = write(folder, "atif", tmp_path / "a.jsonl", tokens=True)
    assert [row["extra"]["reward"] is None for row in rows] == [False, False, True]
    first = rows[0]
    assert [step["source"] for step in first["steps"]] == ["system", "user", "agent", "agent"]
    assert first["steps"][2]["observation"]["results"][1] == {"source_call_id": "c2", "content": "wrong"}
    assert first["steps"][3]["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 7]
    edited, sub = first["subagent_trajectories"]
    assert [step.get("is_copied_context", False) for step in edited["steps"]] == [True, True, True, False]
    assert len(sub["steps"]) == 2
    imported = import_atif([tmp_path / "a.jsonl"], tmp_path / "runs")
    for (before, segments), (after, again) in zip(read(folder), read(imported), strict=True):
        assert (after.outcome, after.reward, after.rewards) == (before.outcome, before.reward, before.rewards)
        assert [(one.tokens, one.mask, one.logprobs, one.versions, one.turns) for one in again] == [
            (one.tokens, one.mask, one.logprobs, one.versions, one.turns) for one in segments
        ]
    again_rows = write(imported, "atif", tmp_path / "b.jsonl", tokens=True)
    assert [row["steps"] for row in again_rows] == [row["steps"] for row in rows]


def test_trajectories_of_other_programs_are_imported_with_what_they_have(tmp_path: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "1+1?"}]},
        {
            "step_id": 2,
            "source": "agent",
            "message": "2",
            "timestamp": "2026-01-01T00:00:00Z",
            "metrics": {"prompt_tokens": 5, "completion_tokens": 1},
        },
    ]
    one = {
        "schema_version": "ATIF-v1.4",
        "session_id": "s",
        "agent": {"name": "a", "version": "1"},
        "steps": steps,
    }
    (tmp_path / "one.json").write_text(json.dumps(one, indent=1))
    rewarded = {**one, "session_id": "t", "extra": {"reward": 10**400}, "final_metrics": {"extra": {"reward": 1}}}
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(rewarded)}\n{json.dumps(rewarded)}\n")
    (first, _), *others = read(import_atif([tmp_path / "one.json", tmp_path / "two.jsonl"], tmp_path / "runs"))
    assert (first.task, first.outcome, first.reward, first.usage.without_tokens) == ("s", Completed(), None, 1)
    assert [(other.id, other.reward, other.usage.sampled_tokens) for other, _ in others] == [
        *(("1.0", 1.0, 1), ("1.1", 1.0, 1))
    ]


def make_step(**metrics: Any) -> str:
    """Return a trajectory with one reply that has these metrics."""
    return json.dumps({"schema_version": "ATIF-v1.7", "steps": [{"source": "agent", "metrics": metrics}]})


def make_numbered(*turns: int) -> str:
    """Return a trajectory whose replies have these numbers, as in an export of Rookery."""
    steps = [{"source": "agent", "extra": {"turn": turn}} for turn in turns]
    return json.dumps({"schema_version": "ATIF-v1.7", "steps": steps})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"schema_version": "ATIF-v2.0", "steps": []}',
        '{"schema_version": "ATIF-v1.7", "steps": [{"source": "nobody"}]}',
        '{"schema_version": "ATIF-v1.7", "steps": [{"source": "agent", "timestamp": "yesterday"}]}',
        '{"schema_version": "ATIF-v1.7", "steps": [{"source": "agent", "extra": {"turn": 0, "finish": "?"}}]}',
        "[" * 100_000,
        make_step(prompt_token_ids=[1], completion_token_ids=[2], logprobs=[-1e300]),
        make_step(prompt_tokens=10**30),
        make_numbered(1, 0, 1, 2),  # a cycle
        make_numbered(0, 0),
    ],
)
def test_invalid_trajectories_are_refused_before_a_run_is_created(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UsageError):
        import_atif([tmp_path / "a.jsonl"], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_token_ids_are_refused_where_a_format_has_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write(folder, "openai", tmp_path / "a.jsonl", tokens=True)


PIXEL = "data:image/png;base64,iVBORw0KGgo="
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": PIXEL}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.jpg"}},
            {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},  # ATIF does not have all of it
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        ]
    ),
)
CONTENTS = st.one_of(TEXTS, st.lists(PARTS, min_size=1, max_size=3).map(tuple))
NAMES = st.none() | TEXTS
INPUTS = st.one_of(
    st.builds(Message, st.sampled_from(["system", "developer", "user"]), CONTENTS, name=NAMES),
    st.builds(Message, st.just("tool"), CONTENTS, tool_call_id=st.sampled_from(["c1", "c2", ""])),
)
CALLS = st.lists(
    st.builds(ToolCall, st.sampled_from(["c1", "c2", ""]), TEXTS, st.sampled_from(['{"a": 1}', "no"]))
)
TOOLS = st.lists(st.builds(ToolSchema, TEXTS, TEXTS, st.just({"type": "object"})), max_size=2).map(tuple)


@st.composite
def make_chain(draw: st.DrawFn) -> list[Turn]:
    """Return the turns of one conversation with any messages, tools and tokens."""
    turns: list[Turn] = []
    tools, length = draw(TOOLS), 0
    for index in range(draw(st.integers(1, 3))):
        calls = tuple(draw(CALLS))
        content = draw(CONTENTS) or (None if calls else "")
        sampled = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        turn = Turn(
            attempt="0.0.0",
            index=index,
            parent=index - 1 if index else None,
            messages=tuple(draw(st.lists(INPUTS, min_size=1, max_size=3))),
            response=Message("assistant", content, calls, name=draw(NAMES), reasoning=draw(NAMES) or None),
            prefix=length,
            prompt=struct.pack("<i", index),
            sampled=struct.pack(f"<{len(sampled)}i", *sampled),
            logprobs=struct.pack(f"<{len(sampled)}f", *([-0.5] * len(sampled))),
            prompt_tokens=length + 1,
            sampled_tokens=len(sampled),
            scope=b"" if index else hash_tools(tools),
            tools=() if index else tools,
        )
        turns.append(turn)
        length += 1 + len(sampled)
    return turns


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(make_chain())
def test_any_conversation_is_the_same_after_an_export_and_an_import(turns: list[Turn]) -> None:
    run = {"environment": "e", "model": "m", "name": "run"}
    with TemporaryDirectory() as name:
        images = ConversationImages(Path(name) / "a-images")
        row = make_trajectory(record(0, 0), turns, run=run, tokens=True, images=images)
        (Path(name) / "a.jsonl").write_text(json.dumps(row))
        (one,) = atif_import.read_trajectories(Path(name) / "a.jsonl")
        again = atif_import.make_turns(one, Path(name))
    assert [msgspec.structs.replace(turn, attempt="0.0.0") for turn in again] == turns


def test_images_and_tools_are_exported_and_read_only_beside_the_trajectory(run: Path, tmp_path: Path) -> None:
    tools = (ToolSchema("add", "Adds.", {"type": "object"}),)
    content = ({"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": PIXEL}})
    turn = Turn(
        attempt="0.0.0",
        index=0,
        messages=(Message("user", content),),
        response=Message("assistant", "A dot."),
        scope=hash_tools(tools),
        tools=tools,
    )
    with Journal.create(run, {}, env="sums", model="m") as journal:
        journal.add_tasks([Task(id="t0")])
        with TokenWriter(run / "tokens", "images") as writer:
            journal.add_rollout(record(0, 0, tokens=(writer.append(encode_turn(turn)),)))
    (row,) = write(run, "atif", tmp_path / "a.jsonl")
    (definition,) = row["agent"]["tool_definitions"]
    assert definition["function"]["name"] == "add"
    source = row["steps"][0]["message"][1]["source"]
    assert source["media_type"] == "image/png"
    assert (tmp_path / source["path"]).parent == tmp_path / "a-images"
    assert write(run, "openai", tmp_path / "b.jsonl")[0]["tools"] == [definition]
    assert json.loads(write(run, "sharegpt", tmp_path / "c.jsonl")[0]["tools"])[0]["name"] == "add"
    with RunReader(import_atif([tmp_path / "a.jsonl"], tmp_path / "runs")) as reader:
        (again,) = reader.turns(next(iter(reader.iter_rollouts())))
    assert (again.messages, again.tools) == (turn.messages, tools)
    source["path"] = "../secret.png"
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError):
        import_atif([tmp_path / "a.jsonl"], tmp_path / "more")
