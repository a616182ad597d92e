"""Trees of sub-calls: depth, budgets at every level, calls that outlive their cell, and failures."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Failed, Truncated, WorkerRecoveryError
from rookery.engine.retry import RetryPolicy
from rookery.environments import Context
from rookery.environments.rlm import RlmEnvironment
from rookery.environments.rlm.python_repl import CellResult
from rookery.environments.tools import tool
from tests.environments.rlm.helpers import (
    Models,
    count_replies,
    read_turns,
    run_group,
    run_rollout,
    segments_by_role,
    trains_each_reply_once,
)
from tests.servers import Answer
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("mount")
TASK: dict[str, Any] = {"id": "t", "prompt": "the root", "context": "abc", "answer": "done"}


def play_levels(messages: list[dict[str, Any]]) -> str:
    """Play a root whose levels each call the next one from a cell and answer with its reply."""
    question, done = messages[1]["content"], count_replies(messages)
    if question == "the root":
        return ["<code>found = rlm('level one', context='x' * 10)", "<code>print(found)", "done"][done]
    if question == "level one":
        return ["<code>found = rlm('level two', context=context + 'y')", "<code>answer('one of ' + found)"][done]
    return ["<code>found = llm('leaf: ' + context)", "<code>answer('two of ' + found)"][done]


@pytest.mark.parametrize("train", [True, False])
async def test_tree_of_three_levels_is_recorded_completely(tmp_path: Path, train: bool) -> None:
    models = Models(play_levels, lambda messages: f"<{messages[-1]['content']}>")
    rollout = await run_rollout(models, tmp_path, TASK, max_depth=3, train_sub=train)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    assert "one of two of <leaf: xxxxxxxxxxy>" in str(models.server.requests[-1].body["messages"])
    assert (rollout.metrics["depth"], rollout.metrics["sub_calls"]) == (3, 5)
    found = segments_by_role(read_turns(tmp_path, rollout))
    assert {role: sum(len(part.turns) for part in parts) for role, parts in found.items()} == (
        {"policy": 8} if train else {"policy": 3, "sub": 5}
    )
    assert trains_each_reply_once(models, [part for parts in found.values() for part in parts])
    assert rollout.segments == found["policy"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"max_depth": 2}, "2 deep"),
        ({"max_depth": 3, "max_calls": 4}, "all 4 sub-calls"),
        ({"max_depth": 3, "max_calls": 0}, "all 0 sub-calls"),
        ({"max_depth": 3, "max_calls": 1}, "all 1 sub-calls"),
    ],
)
async def test_exhausted_budget_is_observed_at_the_level_that_exhausts_it(
    tmp_path: Path, options: dict[str, Any], limit: str
) -> None:
    observations: list[str] = []

    def root(messages: list[dict[str, Any]]) -> str:
        observations.append(messages[-1]["content"])
        if "BudgetExhausted" in messages[-1]["content"]:
            return "gave up"
        if messages[1]["content"] == "the root" and len(messages) > 2:
            return "done"
        return play_levels(messages)

    models = Models(root, lambda _: "leaf")
    rollout = await run_rollout(models, tmp_path, TASK, **options)
    assert rollout.outcome == Completed()
    assert any(limit in text for text in observations)
    assert rollout.metrics["sub_calls"] <= options.get("max_calls", 500)


async def test_tokens_used_at_one_level_are_missing_at_every_level(tmp_path: Path) -> None:
    observations: list[tuple[str, str]] = []

    def root(messages: list[dict[str, Any]]) -> str:
        observations.append((messages[1]["content"], messages[-1]["content"]))
        if "BudgetExhausted" in messages[-1]["content"]:
            return "done"
        return play_levels(messages)

    start = [{"role": "system", "content": ""}, {"role": "user", "content": "the root"}]
    first = len(play_levels(start)) + 1
    start[1]["content"] = "level one"
    spent = first + len(play_levels(start)) + 1
    # The cells of the root and of level one use up the tokens for sub-calls; the remaining tenth is for the root.
    models = Models(root, lambda _: "leaf")
    rollout = await run_rollout(models, tmp_path, TASK, max_depth=3, max_tokens=spent + spent // 9)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    assert models.subs == []
    levels = [level for level, text in observations if re.search(r"BudgetExhausted: .*\btokens\b", text)]
    assert levels == ["the root"], "levels one and two could not call a model any more"
    assert rollout.metrics["sub_calls"] == 3


async def test_token_budget_covers_the_whole_tree(tmp_path: Path) -> None:
    # A reply of a sub-model has 50 IDs. A tenth of the tokens is reserved for the root's answer.
    models = Models(
        ["<code>r = llm_batch(['p'] * 40, max_tokens=50)\nsum(x is not None for x in r)", "done"],
        lambda _: "x" * 49,
    )
    rollout = await run_rollout(models, tmp_path, TASK, max_tokens=1000)
    assert rollout.reward == 1.0
    asked = [
        request.body.get("max_completion_tokens") or request.body["max_tokens"]
        for request in models.server.requests
    ]
    assert rollout.metrics["tree_tokens"] <= 1000
    assert len(models.subs) == (900 - len("<code>r = llm_batch(['p'] * 40, max_tokens=50)\n") - 39) // 50 + 1
    assert min(asked) < 50, "the last call got what was left"
    assert re.search(r"\b1000 tokens\b", models.observations[0])


async def test_root_without_tokens_is_truncated(tmp_path: Path) -> None:
    models = Models(lambda _: f"<code>'{'x' * 80}'")
    rollout = await run_rollout(models, tmp_path, TASK, max_tokens=300)
    assert rollout.outcome == Truncated("tokens")


CALL_500_TIMES = """<code>r = llm_batch([f"#{i}" for i in range(490)])
r += [llm(f"#{i}") for i in range(490, 500)]
len(set(r))"""


async def test_five_hundred_sub_calls_in_one_rollout(tmp_path: Path) -> None:
    models = Models(
        [
            CALL_500_TIMES,
            "done",
        ],
        lambda messages: f"re {messages[-1]['content']}",
    )
    rollout = await run_rollout(models, tmp_path, TASK, concurrency=32)
    assert models.observations[0].startswith("<result>\n500\n[left: 0 ")
    assert models.server.peak <= 32
    assert len(rollout.segments) == 501
    assert trains_each_reply_once(models, rollout.segments)


class _ExposesContext(RlmEnvironment):
    """Exposes the attempt's context to the test."""

    ctx: Context

    async def setup(self, ctx: Context) -> None:
        await super().setup(ctx)
        self.ctx = ctx


CRASH_DURING_CALLS = """<code>import os, threading, time
def end():
    while not os.path.exists("now"):
        time.sleep(0.01)
    os._exit(9)
threading.Thread(target=end).start()
llm_batch([f"p{i}" for i in range(4)])"""


async def test_sub_calls_outlive_their_repl_and_are_not_repeated(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script = [CRASH_DURING_CALLS, '<code>llm_batch([f"p{i}" for i in range(5)])', "done"]

    def root(messages: list[dict[str, Any]]) -> str:
        done = count_replies(messages)
        if done:
            gate.set()  # the REPL was lost before any reply arrived
            observations.append(messages[-1]["content"])
        return script[done]

    observations: list[str] = []
    models = Models(root, lambda messages: Answer(f"re {messages[-1]['content']}", hold=gate))
    env = _ExposesContext()
    playing = asyncio.create_task(run_rollout(models, tmp_path, TASK, env=env))
    await wait_until(lambda: len(models.subs) == 4)
    await (await env.ctx.sandbox()).write("now", b"")
    rollout = await playing
    assert "[crash: " in observations[0]
    assert "['re p0', 're p1', 're p2', 're p3', 're p4']" in observations[1]
    assert sorted(models.subs) == ["p0", "p1", "p2", "p3", "p4"], "running calls were not repeated"
    assert rollout.metrics["sub_calls"] == 5
    assert trains_each_reply_once(models, rollout.segments)


@pytest.mark.long
async def test_hung_sub_call_fails_alone(tmp_path: Path) -> None:
    never = asyncio.Event()
    models = Models(
        ["<code>print(llm_batch(['a', 'hang', 'b']))", "done"],
        lambda messages: Answer("ok", hold=never if messages[-1]["content"] == "hang" else None),
    )
    rollout = await run_rollout(models, tmp_path, TASK, sub_timeout=10.5, cell_seconds=10.0)
    assert rollout.reward == 1.0
    assert "['ok', None, 'ok']" in models.observations[0]
    assert re.search(r"#1: .*\b10\.5\b", models.observations[0])
    assert "time_limit" not in models.observations[0], "time in sub-calls does not count against the cell"
    assert models.server.disconnects == 1


async def test_refused_prompt_is_observed_and_a_failing_server_is_infra(tmp_path: Path) -> None:
    refused = Answer(status=400, error="too long", code="context_length_exceeded")
    models = Models(["<code>llm('x')", "done"], lambda _: refused)
    rollout = await run_rollout(models, tmp_path, TASK)
    assert rollout.reward == 1.0
    assert "CallFailed: " in models.observations[0]
    models = Models(["<code>llm('x')", "done"], lambda _: Answer(status=500))
    rollout = await run_rollout(models, tmp_path / "broken", TASK)
    assert isinstance(rollout.outcome, Failed)
    assert rollout.outcome.fault == "infra"


@pytest.mark.long
async def test_failed_cells_are_observed_and_the_state_is_kept(tmp_path: Path) -> None:
    models = Models(
        [
            "<code>x = 41",
            "<code>import time; time.sleep(600)",
            "<code>y = bytearray(1 << 30)",
            "<code>exit()",
            "<code>import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "<code>print(x + 1, context)",
            "done",
        ]
    )
    rollout = await run_rollout(models, tmp_path, TASK, cell_seconds=8.0, cell_memory=128 << 20)
    assert rollout.reward == 1.0
    assert [
        "time_limit" in models.observations[1],
        "memory_limit" in models.observations[2],
        "crash" in models.observations[4],
    ] == [True] * 3
    assert "42 abc" in models.observations[5]


async def test_context_is_loaded_again_after_the_state_was_lost(tmp_path: Path) -> None:
    models = Models(
        [
            "<code>import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
            "<code>import os; os._exit(1)",
            "<code>print(context, llm_batch(['a']), 'threading' in globals())",
            "done",
        ]
    )
    await run_rollout(models, tmp_path, TASK)
    assert "`context`" in models.observations[1]
    assert "abc ['sub'] False" in models.observations[2]


@pytest.mark.long
async def test_option_ends_the_rollout_when_a_cell_times_out(tmp_path: Path) -> None:
    models = Models(["<code>while True: pass", "never asked"])
    rollout = await run_rollout(models, tmp_path, TASK, cell_seconds=1.0, end_on_timeout=True)
    assert (rollout.outcome, rollout.reward) == (Truncated("time"), 0.0)
    assert len(models.server.requests) == 1


class _WorkerLost(RlmEnvironment):
    """The worker of one rollout of the group cannot be restarted."""

    async def run(self, ctx: Context) -> None:
        if ctx.attempt.split(".")[1] == "3":
            worker = ctx.state["repl"].worker

            async def start(*, kill_leftovers: bool) -> None:
                raise WorkerRecoveryError(f"no Python can be started (kill_leftovers={kill_leftovers})")

            worker._start = start
            await worker.process.kill()
        await super().run(ctx)


async def test_failed_recovery_in_one_of_eight_rollouts_is_infra_and_the_others_continue(tmp_path: Path) -> None:
    models = Models(["<code>llm('a')", "done"])
    group = await run_group(
        models, tmp_path, TASK, k=8, env=_WorkerLost(), retry=RetryPolicy(attempts=2, base=0.001)
    )
    outcomes = [rollout.outcome for rollout in group.rollouts]
    lost = outcomes.pop(3)
    assert isinstance(lost, Failed)
    assert (lost.fault, lost.cause) == ("infra", "worker.unrecoverable")
    assert len(group.rollouts[3].attempts) == 2
    assert outcomes == [Completed()] * 7
    assert group.rollouts[3].segments == []
    assert sum(rollout.reward or 0 for rollout in group.rollouts) == 7


class _ShellLost(RlmEnvironment):
    """Closes the sandbox when the shell has to be replaced; only in the first attempt if `first_only`."""

    first_only = True

    def on_cell(self, ctx: Context, result: CellResult, *, root: bool) -> None:
        super().on_cell(ctx, result, root=root)
        if result.recovered == "reset" and (ctx.attempt.endswith(".1") or not self.first_only):
            ctx.state["lost"] = asyncio.ensure_future(ctx.state["repl"].sandbox.close())


class _ShellLostAlways(_ShellLost):
    first_only = False


@pytest.mark.long
@pytest.mark.parametrize("env", [_ShellLost, _ShellLostAlways])
async def test_bash_that_cannot_be_replaced_is_unrecoverable(tmp_path: Path, env: type[_ShellLost]) -> None:
    models = Models(["<code>exit 3", "<code>sleep 1; echo alive", "done"])
    retry = RetryPolicy(attempts=3, base=0.001)
    group = await run_group(models, tmp_path, TASK, k=1, env=env(repl="bash"), retry=retry)
    (rollout,) = group.rollouts
    lost = rollout.attempts[0].outcome
    assert isinstance(lost, Failed)
    assert (lost.fault, lost.cause) == ("infra", "worker.unrecoverable")
    assert rollout.outcome == (Completed() if env.first_only else Truncated("lost"))
    assert rollout.reward == (1.0 if env.first_only else 0.0)
    assert len(rollout.attempts) == 2


# ---- bash


CONNECT_WITHOUT_SECRET = """<code>port=$(grep -o 'tcp/127.0.0.1/[0-9]*' .rlm/llm | grep -o '[0-9]*$')
(exec 3<>/dev/tcp/127.0.0.1/$port; echo 'wrong llm 0 0' >&3; cat <&3; echo nothing came)"""


@pytest.mark.long
async def test_bash_has_the_functions_as_commands(tmp_path: Path) -> None:
    @tool
    async def lookup(name: str) -> dict[str, str]:
        """Looks up."""
        return {"found": name}

    models = Models(
        [
            '<code>cd /tmp; wc -c < "$CONTEXT"; llm two words; echo "from input" | llm summarise: -',
            "<code>printf 'a\\n\"b\\\\nc\"\\n' > f; llm --system s --batch f; budget",
            "<code>exit 3",
            "<code>lookup '{\"name\": \"z\"}'; lookup '{}'; llm --max-tokens x y; llm </dev/null",
            CONNECT_WITHOUT_SECRET,
            "<code>answer $(llm last)",
        ],
        lambda messages: f"[{messages[-1]['content']}]",
    )
    rollout = await run_rollout(models, tmp_path, {**TASK, "answer": "[last]"}, repl="bash", tools=[lookup])
    assert rollout.reward == 1.0
    assert models.observations[0].split("\n")[1:5] == ["3", "[two words]", "[summarise:", ""]
    assert '"[a]"\n"[b\\nc]"\n{"calls_left":496' in models.observations[1]
    assert "exit code 3" in models.observations[2]
    assert '{"found":"z"}' in models.observations[3]
    assert re.search(r"\bname\b", models.observations[3])
    assert "--max-tokens" in models.observations[3]
    assert models.observations[4].startswith("<result>\nnothing came\n")
    assert models.subs[:2] == ["two words", "summarise:\n\nfrom input\n"]
    assert trains_each_reply_once(models, rollout.segments)


@pytest.mark.long
async def test_bash_cell_past_its_time_limit_is_observed(tmp_path: Path) -> None:
    models = Models(["<code>sleep 60", "done"])
    rollout = await run_rollout(models, tmp_path, TASK, repl="bash", cell_seconds=1.0)
    assert rollout.reward == 1.0
    assert "time_limit" in models.observations[0]


@pytest.mark.long
async def test_bash_sub_models_get_files_as_context(tmp_path: Path) -> None:
    def root(messages: list[dict[str, Any]]) -> str:
        done = count_replies(messages)
        if messages[1]["content"] == "the root":
            return ["<code>echo over there > part; rlm 'what is in it?' part", "done"][done]
        return ['<code>answer "it says $(cat $CONTEXT)"'][done]

    models = Models(root)
    rollout = await run_rollout(models, tmp_path, TASK, repl="bash", max_depth=2)
    assert rollout.reward == 1.0
    assert "it says over there" in str(models.server.requests[-1].body["messages"][-1])


@pytest.mark.long
async def test_sub_call_of_a_stopped_script_is_reused_by_the_next_equal_one(tmp_path: Path) -> None:
    gate = asyncio.Event()

    def root(messages: list[dict[str, Any]]) -> str:
        done = count_replies(messages)
        if done == 1:
            gate.set()
        return ["<code>timeout 10.5 llm slow", "<code>answer $(llm slow)"][done]

    models = Models(root, lambda _: Answer("done", hold=gate))
    rollout = await run_rollout(models, tmp_path, TASK, repl="bash", cell_seconds=10.0)
    assert rollout.reward == 1.0
    assert models.subs == ["slow"]
    observations = models.server.requests[2].body["messages"][-1]["content"]
    assert "[exit code 124]" in observations, "time in sub-calls does not count against the script"
