"""The built-in taskset and environment `arithmetic`."""

import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import SandboxSpec, Task, UsageError
from rookery.environments import Score, load_environment
from rookery.environments.arithmetic import LEVELS, Arithmetic, generate_problems
from rookery.environments.arithmetic.problems import draw_problem, get_split
from rookery.environments.text import render
from rookery.sandboxes import open_provider
from rookery.sandboxes.protocol import ProviderHome, Sandbox
from rookery.scoring.answers import match_answer
from rookery.upstreams.embedded import chat
from tests.environments.helpers import Attempt, Reply, calls

# These must never change: task IDs in old runs refer to these problems.
FIXED = {
    "train-0-l1-00000": (
        "Work out 72 / 8.",
        9,
    ),
    "train-7-l2-00003": (
        "Vic has 33 eggs. Vic finds 36 more. How many eggs are there now?",
        69,
    ),
    "held-out-0-l3-00002": (
        "Sam has 68 jars. Sam makes 37 more. Sam makes 90 more. How many jars does Sam have now?",
        195,
    ),
    "held-out-1-l4-00001": (
        (
            "Gus has 6 boxes of 36 apples. Mia brings 359 more. Then there are 3 times as many. Gus "
            "packs them in boxes of 6. How many are left over?"
        ),
        3,
    ),
    "held-out-0-l5-00009": (
        "((587 - 209) * 10 - 346) * 5 - (497 + 170) * 8 = ?",
        11834,
    ),
}


def run_program(code: str) -> str:
    """Return the output of a program of the generator."""
    printed: list[str] = []
    exec(code, {"__builtins__": {}, "print": lambda value: printed.append(str(value))})
    return "\n".join(printed)


@given(seed=st.integers(), level=st.sampled_from(LEVELS))
@settings(max_examples=300, deadline=None)
def test_every_answer_is_an_exact_integer_and_its_program_prints_it(seed, level):
    problem = draw_problem(random.Random(seed), level)
    assert type(problem.answer) is int
    assert run_program(problem.program) == str(problem.answer)
    if problem.kind in ("expression", "brackets"):
        exact = problem.statements[0].code.replace("//", "/")
        assert eval(exact) == problem.answer
    assert problem.prompt.isascii()
    assert len(problem.prompt) <= 240
    assert problem.answer >= 0


def test_problems_of_a_seed_never_change():
    for task_id, (text, answer) in FIXED.items():
        split, seed, level, number = task_id.rsplit("-", 3)
        env = Arithmetic(split, size=int(number) + 1, seed=int(seed), levels=int(level[1:]))
        task = env.tasks()[-1]
        assert (task.id, task.text, task.data["answer"]) == (task_id, text, answer)


@given(seeds=st.tuples(st.integers(), st.integers()), level=st.sampled_from(LEVELS))
@settings(max_examples=10, deadline=None)
def test_train_and_held_out_have_no_problem_in_common_whatever_the_seeds(seeds, level):
    train = list(islice(generate_problems("train", seeds[0], level), 300))
    held_out = list(islice(generate_problems("held-out", seeds[1], level), 300))
    assert {get_split(one.prompt) for one in train} == {"train"}
    assert {get_split(one.prompt) for one in held_out} == {"held-out"}
    assert not {one.prompt for one in train} & {one.prompt for one in held_out}


def test_split_depends_on_the_numbers_only():
    assert get_split("What is 7 + 5?") == get_split("7 * 5 = ?") == get_split("Ada has 7 figs. Ben takes 5.")


def test_problems_are_unique():
    tasks = Arithmetic("held-out", size=5_000).tasks()
    assert len({task.id for task in tasks}) == 5_000
    assert max(Counter(task.text for task in tasks).values()) == 1


def test_exhausted_level_is_refused(monkeypatch):
    monkeypatch.setattr(
        "rookery.environments.arithmetic.problems._MAX_FRUITLESS_DRAWS", 8
    )  # all of them take seconds
    with pytest.raises(UsageError, match=r"\b1\b"):
        Arithmetic("train", size=60_000, levels=[1]).tasks()


def test_any_prefix_is_balanced_over_the_levels():
    levels = [task.data["level"] for task in Arithmetic(size=23).tasks()]
    assert levels == [1 + index % 5 for index in range(23)]
    assert [task.data["level"] for task in Arithmetic(size=4, levels=[5, 2]).tasks()] == [5, 2, 5, 2]


def test_held_out_tasks_have_the_levels_of_the_evaluation():
    tasks = Arithmetic("held-out", size=10, seed=2).tasks()
    assert Arithmetic(seed=2, levels=[4, 5], held_out_levels=LEVELS).held_out_tasks(10) == tasks
    (task,) = Arithmetic(levels=5).held_out_tasks(1)
    assert task.data["level"] == 5


def test_task_id_always_means_the_same_problem():
    some = {task.id: task for task in Arithmetic("held-out", size=100, seed=3).tasks()}
    more = {task.id: task for task in Arithmetic("held-out", size=300, seed=3, levels=(4, 2)).tasks()}
    shared = some.keys() & more.keys()
    assert len(shared) == 40
    assert "held-out-3-l4-00019" in shared
    assert all(some[task_id] == more[task_id] for task_id in shared)


def test_harder_levels_have_longer_problems_of_every_kind():
    by_level = {level: list(islice(generate_problems("train", 0, level), 300)) for level in LEVELS}
    lengths = [sum(len(one.prompt) for one in problem) for problem in by_level.values()]
    assert lengths == sorted(lengths)
    assert {one.kind for one in by_level[1]} == {"expression"}
    assert {one.kind for one in by_level[2]} >= {"expression", "story"}
    assert {one.kind for one in by_level[4]} >= {"brackets", "story", "distractor", "sharing", "leftover"}
    assert {one.kind for one in by_level[5]} == {"brackets", "distractor"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test"}, "split.*'test'"),
        ({"size": 0}, "size.* 0$"),
        ({"size": True}, "size.*True"),
        ({"size": 1.5}, "size.*1.5"),
        ({"size": 100_001}, "size.*100001"),
        ({"seed": "a"}, "seed.*'a'"),
        ({"levels": []}, "levels"),
        ({"levels": [6]}, r"levels.*\[6\]"),
        ({"levels": [1, 1]}, r"levels.*\[1, 1\]"),
        ({"levels": ["1"]}, "levels"),
        ({"levels": [[1]]}, "levels"),
        ({"levels": "12"}, "levels"),
        ({"levels": None}, "levels"),
        ({"held_out_levels": [0]}, r"held_out_levels.*\[0\]"),
    ],
)
def test_invalid_arguments_are_refused_with_their_value(arguments, named):
    with pytest.raises(UsageError, match=named):
        load_environment("arithmetic", **arguments)


def test_environment_is_loaded_by_name_with_arguments():
    env = load_environment("arithmetic", split="held_out", size=10, levels=[1, 2])
    assert isinstance(env, Arithmetic)
    assert (env.title, env.split, env.levels) == ("arithmetic", "held-out", (1, 2))
    assert [task.id for task in env.tasks()][:3] == [
        "held-out-0-l1-00000",
        "held-out-0-l2-00000",
        "held-out-0-l1-00001",
    ]


def test_prompts_are_short_for_the_embedded_policy():
    env = Arithmetic(size=50)
    attempts = [chat.message_ids(task.prompt[0]) for task in env.tasks()]
    assert len(env.system_prompt.encode()) <= 60
    assert max(map(len, attempts)) < 260


async def run_attempt(tmp_path, script: list[Reply], task: Task) -> tuple[Score, Attempt]:
    provider = open_provider("subprocess", ProviderHome(folder=tmp_path, run="r1"))

    async def open_sandbox(spec: SandboxSpec) -> Sandbox:
        return await provider.create(spec, attempt="a1")

    env = Arithmetic()
    try:
        attempt = Attempt(script, task=task, limits=env.limits, open_sandbox=open_sandbox)
        await env.run(attempt.ctx)
        score = await env.score(attempt.ctx)
    finally:
        await provider.close()
    assert isinstance(score, Score)
    return score, attempt


async def test_correct_number_at_the_end_of_the_answer_scores_one(tmp_path):
    (task,) = Arithmetic("held-out", size=1, levels=[3]).tasks()
    (problem,) = islice(generate_problems("held-out", 0, 3), 1)
    program = calls(("python", render({"code": problem.program})))
    score, attempt = await run_attempt(tmp_path, [program, f"The answer is {problem.answer}."], task)
    assert score == Score(1.0, metrics={"used_python": 1.0, "level": 3.0})
    assert attempt.observations == [f"{problem.answer}\n"]
    assert [message.role for message in attempt.ctx.state["messages"]][:2] == ["system", "user"]
    assert match_answer(f"{problem.answer}", task.data["answer"])


async def test_wrong_answer_scores_zero_and_a_broken_program_is_an_observation(tmp_path):
    (task,) = Arithmetic("held-out", size=1, levels=[3]).tasks()
    wrong = task.data["answer"] + 1
    broken = calls(("python", render({"code": "print((1+2"})))
    score, attempt = await run_attempt(tmp_path, [broken, f"The answer is {wrong}."], task)
    assert score == Score(0.0, metrics={"used_python": 1.0, "level": 3.0})
    assert "SyntaxError: '(' was never closed" in attempt.observations[0]
    score, _ = await run_attempt(tmp_path, ["I do not know."], task)
    assert score == Score(0.0, metrics={"used_python": 0.0, "level": 3.0})
