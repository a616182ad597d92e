"""Tests of the training script of the embedded policy: teacher, model, evaluation, and a short run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import SandboxSpec
from rookery.environments.arithmetic import LEVELS, Arithmetic, generate_problems
from rookery.environments.arithmetic.problems import get_split
from rookery.environments.text import render
from rookery.sandboxes import open_provider
from rookery.sandboxes.protocol import ProviderHome, Sandbox
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.weights import LlamaShape, Weights
from tests.environments.helpers import Attempt, calls

torch.set_num_threads(1)  # the script's own runs set what they need
TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import train_embedded  # noqa: E402
from embedded import teacher  # noqa: E402
from embedded.evaluation import evaluate, render_ids  # noqa: E402
from embedded.model import SHAPE, Llama  # noqa: E402
from embedded.programs import REFUSED, run_program, run_tool_call  # noqa: E402
from embedded.teacher import Teacher  # noqa: E402
from embedded.training import Plan, batches, orthogonalize, train  # noqa: E402

pytestmark = pytest.mark.long

SMALL = LlamaShape(
    vocab_size=chat.VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)


# ------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("shape", [SHAPE, SMALL])
def test_logprobs_agree_with_llama_for_causal_lm(shape):
    weights = Weights.random(shape, seed=3, scale=0.2)
    model = Llama(shape)
    model.load(weights)
    ids = torch.randint(0, shape.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model.logits(model.hidden(ids)).log_softmax(-1)
        theirs = weights.to_model()(ids).logits.log_softmax(-1)
    assert (ours - theirs).abs().max() < 1e-4


def test_kv_cache_does_not_change_logits():
    model = Llama(SMALL, seed=2)
    ids = torch.randint(0, chat.VOCAB, (3, 20))
    with torch.no_grad():
        whole = model.hidden(ids)
        cache, begun = model.cache(3, 24), torch.tensor([5, 9, 12])
        model.hidden(ids[:, :12], cache, torch.zeros(3, dtype=torch.long))  # some of it is padding for two of them
        for step in range(8):
            at = begun + step
            next_ids = ids[torch.arange(3), at][:, None]
            seen = model.hidden(next_ids, cache, at)[:, 0]
            assert torch.allclose(seen, whole[torch.arange(3), at], atol=1e-5)


def test_model_has_about_six_hundred_thousand_parameters():
    assert SHAPE.parameters == 593_024
    assert len(Llama().export().to_bytes("F16")) < 2_000_000


def test_muon_makes_matrices_orthogonal():
    matrices = torch.randn(2, 48, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert 0.5 < values.min() < values.max() < 1.5


# ---------------------------------------------------------------------------------------------- the teacher


def test_dialogue_starts_like_a_rollout_of_the_environment():
    env = Arithmetic("train", size=1)
    (problem,) = islice(generate_problems("train", 0, 1), 1)
    dialogue = Teacher(0).dialogue(problem)
    attempted = [chat.message_ids(message) for message in env.tasks()[0].prompt]
    begun = render_ids(dialogue.ids[: dialogue.is_assistant.index(True)])
    assert begun == (
        f"<begin><tools>python(code)<end><system>{env.system_prompt}<end>{render_ids(attempted[0])}<assistant>"
    )


def test_only_assistant_tokens_are_trained():
    for dialogue in Teacher(1).dialogues(200):
        assert len(dialogue.ids) == len(dialogue.is_assistant) <= SHAPE.max_position_embeddings
        spoken = render_ids([token for token, own in zip(dialogue.ids, dialogue.is_assistant, strict=True) if own])
        assert spoken.endswith((".<end>", "I do not know.<end>"))
        assert "<user>" not in spoken
        assert "<tool>" not in spoken
        assert "<assistant>" not in spoken


def test_teacher_errs_more_on_harder_problems():
    rates = []
    for level in LEVELS:
        one, found = Teacher(0), list(islice(generate_problems("train", 1, level), 400))
        rates.append(
            sum(list(one.solve(problem))[-1].text == f"The answer is {problem.answer}." for problem in found)
        )
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.95 * 400
    assert rates[-1] > 0.03 * 400


def test_teacher_without_mistakes_is_always_right(monkeypatch):
    none = dict.fromkeys(LEVELS, 0.0)
    for name, value in (
        ("SLIP_RATES", none),
        ("MISREAD_RATES", none),
        ("GUESS_RATES", none),
        ("DISTRACTED_RATE", 0.0),
    ):
        monkeypatch.setattr(teacher, name, value)
    for level in LEVELS:
        for problem in islice(generate_problems("train", 2, level), 100):
            *_, last = Teacher(0).solve(problem)
            assert last.text == f"The answer is {problem.answer}."


def test_only_problems_of_the_train_split_are_used():
    for dialogue in Teacher(5).dialogues(300):
        text = render_ids(dialogue.ids)
        assert get_split(text.partition("<user>")[2].partition("<end>")[0]) == "train"


def test_batch_targets_are_shifted_by_one():
    found = batches(Plan(steps=40))
    for batch in islice(found, 30):
        assert batch.ids.numel() <= Plan().batch
        kept = batch.targets[:, :-1] >= 0
        assert (batch.targets[:, :-1][kept] == batch.ids[:, 1:][kept]).all()
        assert (batch.targets[batch.is_assistant] >= 0).all()


# --------------------------------------------------------------------------------------------- its programs

PROGRAMS = (
    "print(6*7)",
    "x=12\nx+=5\nx//=2\nx%=5\nprint(x)",
    "print((3+4)",
    "print(3+)",
    "print(012)",
    "x=3\ny+=1\nprint(x)",
    "print(1)\nprint(5//0)",
    "print(y)\nimport os",
    "x=7",
    "print(7/2, -3)",
    "",
)


async def test_program_evaluator_agrees_with_the_python_tool(tmp_path):
    provider = open_provider("subprocess", ProviderHome(folder=tmp_path, run="r1"))

    async def open_sandbox(spec: SandboxSpec) -> Sandbox:
        return await provider.create(spec, attempt="a1")

    arguments = [*(render({"code": code}) for code in PROGRAMS), '{"code":"print(1)', '{"program":"1"}']
    env = Arithmetic()
    try:
        output = [*(calls(("python", one)) for one in arguments), calls(("pyhton", "{}")), "done"]
        attempt = Attempt(output, open_sandbox=open_sandbox)
        await env.run(attempt.ctx)
    finally:
        await provider.close()
    expected = [
        *(run_tool_call("python", one, env.max_result) for one in arguments),
        run_tool_call("pyhton", "{}", 500),
    ]
    assert attempt.observations == expected


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "while True: pass",
        "print(open('/etc/passwd'))",
        "x=9**9**9",
        "print('a'*9)",
        "x=[1]*9",
        "print(().__class__)",
        "print=3",
        "__builtins__\nimport os",
        "print(__builtins__)",
        "x=7\n" + "x*=x\n" * 50,
        "print(1<<9999)",
        "print(1,end='')",
        "(lambda:0)()",
        "x=" + "9" * 1500,
        "1+" * 5000 + "1",
        "(" * 900 + ")" * 900,
    ],
)
def test_evaluator_runs_only_small_arithmetic(code):
    output = run_program(code)
    assert output == REFUSED or "SyntaxError" in output


@given(st.text(alphabet="x=+-*/%()0123456789\nprint ", max_size=60))
@settings(max_examples=300, deadline=None)
def test_evaluator_never_raises(code):
    assert run_program(code)


# ------------------------------------------------------------------------------------------ playing, running


def test_evaluation_is_reproducible_and_respects_budgets():
    env = Arithmetic("held-out", size=10)
    model = Llama(SHAPE, seed=1)  # it says anything
    first, again = (evaluate(model, env, env.tasks(), seed=3) for _ in range(2))
    assert [one.ids for one in first] == [one.ids for one in again]
    assert [one.task.id for one in first] == [task.id for task in env.tasks()]
    assert max(len(one.ids) for one in first) <= SHAPE.max_position_embeddings


def test_training_reduces_the_loss():
    reports = []
    train(Plan(steps=12, batch=400), reports.append, every=4)
    assert [report.step for report in reports] == [4, 8, 12]
    assert reports[-1].loss < reports[0].loss
    assert reports[-1].left == 0.0


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "train_embedded.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_training_twice_gives_the_same_checksum(tmp_path):
    ends = [
        run("--steps", "2", "--batch", "2000", "--evaluate", count, "--out", tmp_path / f"{name}.safetensors")
        for name, count in (("a", "5"), ("b", "0"))
    ]
    assert [ended.returncode for ended in ends] == [0, 0], ends[0].stderr
    a, b = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "ab")
    assert a == b
    record = json.loads((tmp_path / "a.json").read_bytes())
    assert record["sha256"] == hashlib.sha256(a).hexdigest()
    assert record["sha256"] in ends[0].stdout
    assert (record["seed"], record["steps"], record["threads"]) == (0, 2, 2)
    assert record["held_out"]["n"] == 5
    assert [record["held_out"]["levels"][str(level)]["n"] for level in LEVELS] == [1] * 5
    assert record["losses"][-1][1] == record["loss"]
    assert Weights.load(tmp_path / "a.safetensors").shape == SHAPE
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.json",
        "a.safetensors",
        "b.json",
        "b.safetensors",
    ]


def test_interrupt_writes_nothing(tmp_path):
    command = [sys.executable, "-u", str(TOOLS / "train_embedded.py"), "--out", str(tmp_path / "a.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "parameters" in process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err
    assert list(tmp_path.iterdir()) == []


def test_invalid_options_are_reported(capsys):
    for arguments in (("--steps", "0"), ("--seconds", "nan"), ("--evaluate", "-1")):
        with pytest.raises(SystemExit) as ended:
            train_embedded.main(arguments)
        assert ended.value.code == 2
        assert f"argument {arguments[0]}: " in capsys.readouterr().err
