"""Show that SmolLM2-135M-Instruct learns on one GPU: reversing texts, and arithmetic with the sandboxed tool.

    python tools/prove_learning_gpu.py all --model .peers/smollm2/hf --out build/gpu
    python tools/prove_learning_gpu.py warm-up reverse --model … --out …      one part of it
    python tools/prove_learning_gpu.py train reverse --model … --out … --lag 4

The model is too small to solve the tasks at all at first, so it is fine-tuned on a few demonstrations
(`warm-up`), and then trained by reinforcement learning (`train`). Each training writes a plot and `summary.json`.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

import click

from rookery import Message
from rookery.environments import Environment, load_environment
from rookery.environments.arithmetic import LEVELS, generate_problems
from rookery.gateway.chat_renderers import RendererConfig, open_renderer_config
from rookery.trainer import TrainConfig, Trainer, read_metrics

ENVIRONMENTS = Path(__file__).with_name("learning_environments.py")


class Proof(NamedTuple):
    """An environment, the size of its warm-up, and the settings of its training."""

    environment: str
    demonstrations: int
    """Number of demonstrations in the warm-up. Each is seen once."""
    config: TrainConfig


PROOFS = {
    "reverse": Proof(
        f"{ENVIRONMENTS}:ReverseText",
        224,
        TrainConfig(steps=100, groups=16, group_size=8, learning_rate=3e-5, eval_tasks=64, eval_every=20),
    ),
    "arithmetic": Proof(
        "arithmetic",
        160,
        TrainConfig(steps=100, groups=16, group_size=8, learning_rate=2e-5, eval_tasks=100, eval_every=20),
    ),
}
RENDERING = {"tool_prompt": "default"}
TOOL_PARSER = "hermes"
ENGINE: dict[str, Any] = {"rendering": RENDERING, "tool_parser": TOOL_PARSER, "concurrency": 256, "breaker": None}

NAME = click.argument("name", type=click.Choice(list(PROOFS)))
MODEL = click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("build/gpu"), show_default=True)
LAG = click.option("--lag", default=1, show_default=True)
STEPS = click.option("--steps", type=int, default=None, help="Number of training steps.")


@click.group()
def main() -> None:
    """Fine-tune and train SmolLM2."""


@main.command("all")
@MODEL
@OUT
@STEPS
def run_all(model: Path, out: Path, steps: int | None) -> None:
    """Run both proofs, and the first one with three lags at the same time."""
    here = [sys.executable, __file__]
    more = ["--steps", str(steps)] if steps else []
    for name in PROOFS:
        subprocess.run([*here, "warm-up", name, "--model", model, "--out", out], check=True)
    trainings = [("reverse", 0), ("reverse", 1), ("reverse", 4), ("arithmetic", 1)]
    running = [
        subprocess.Popen([*here, "train", name, "--model", out / name, "--out", out, "--lag", str(lag), *more])
        for name, lag in trainings
    ]
    sys.exit(max(process.wait() for process in running))


# ---- warm-up


@main.command("warm-up")
@NAME
@MODEL
@OUT
@click.option("--demonstrations", type=int, default=None, help="Number of demonstrations.")
@click.option("--learning-rate", default=1e-4, show_default=True)
def warm_up(name: str, model: Path, out: Path, demonstrations: int | None, learning_rate: float) -> None:
    """Fine-tune the model on demonstrations, and save it to OUT/NAME."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).train()
    adamw = torch.optim.AdamW(trained.parameters(), lr=learning_rate, weight_decay=0.0)
    proof = PROOFS[name]
    count = demonstrations or proof.demonstrations
    examples = list(demonstrate(name, model, count))
    batches = [examples[at : at + 16] for at in range(0, count, 16)]
    for number, batch in enumerate(batches):
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch], device=device)
        labels = torch.tensor([marks + [-100] * (width - len(marks)) for _, marks in batch], device=device)
        for group in adamw.param_groups:
            group["lr"] = learning_rate * min(1.0, (number + 1) / 5)
        with torch.autocast(device, torch.bfloat16):
            loss = trained(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        click.echo(f"{name}: batch {number + 1} of {len(batches)}, loss {loss.item():.3f}", err=True)
    trained.to(torch.bfloat16).save_pretrained(out / name)
    AutoTokenizer.from_pretrained(model).save_pretrained(out / name)


def demonstrate(name: str, model: Path, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token IDs of demonstrations as the engine would render them, and labels for the replies."""
    environment = load_environment(PROOFS[name].environment)
    renderer = open_renderer_config(
        RendererConfig(tokenizer=str(model), tool_parser=TOOL_PARSER, tool_prompt=RENDERING["tool_prompt"])
    )
    tools = tuple(environment.tools())
    system = (Message("system", getattr(environment, "system_prompt", "")),)
    end = renderer.stop_token_ids[0]
    source = reversals(environment) if name == "reverse" else programs()
    for _ in range(count):
        prompt, replies = next(source)
        ids = to_list(renderer.render((*system, prompt), tools, None))
        labels = [-100] * len(ids)
        for reply, answer in replies:
            said = [*to_list(renderer.encode(reply)), end]
            tail = to_bytes(ids)
            ids, labels = ids + said, labels + said
            if answer is not None:
                added = renderer.extend(tail, to_bytes(said), (answer,), tools, None)
                assert added is not None, "the chat format cannot express a tool result"
                ids, labels = ids + to_list(added), labels + [-100] * (len(added) // 4)
        yield ids, labels


Demonstration = tuple[Message, list[tuple[str, Message | None]]]
"""A prompt, and replies. Each reply has the tool result that follows it, or None."""


def reversals(environment: Environment) -> Iterator[Demonstration]:
    for task in reversed(list(environment.tasks())):  # from the end, which 100 steps of training do not reach
        yield task.prompt[0], [(str(task.data["answer"]), None)]


def programs() -> Iterator[Demonstration]:
    """Yield arithmetic problems with programs."""
    rng = Random(1)  # noqa: S311
    streams = [generate_problems("train", 1, level) for level in LEVELS]
    while True:
        problem = next(rng.choice(streams))
        call = json.dumps({"name": "python", "arguments": {"code": problem.program}})
        result = Message("tool", f"{problem.answer}\n", tool_call_id="call")
        yield (
            Message("user", problem.prompt),
            [
                (f"<tool_call>\n{call}\n</tool_call>", result),
                (f"The answer is {problem.answer}.", None),
            ],
        )


def to_list(ids: bytes) -> list[int]:
    return memoryview(ids).cast("i").tolist()


def to_bytes(ids: list[int]) -> bytes:
    from array import array

    return array("i", ids).tobytes()


# ---- training


@main.command()
@NAME
@MODEL
@OUT
@LAG
@STEPS
def train(name: str, model: Path, out: Path, lag: int, steps: int | None) -> None:
    """Train the model, and write metrics, a plot and a summary."""
    import msgspec

    proof = PROOFS[name]
    config = msgspec.structs.replace(proof.config, lag=lag, **({"steps": steps} if steps else {}))
    trainer = Trainer(
        proof.environment, policy=f"hf:{model}?context=1024", config=config, out=out / f"{name}-lag{lag}", **ENGINE
    )
    trainer.on_row = lambda row: click.echo(f"{name} lag {lag}: {shown(row)}", err=True)
    with GpuUtilisation() as gpu:
        result = trainer.train()
    summary = summarise(trainer.folder.path, gpu.mean) | {
        "name": name,
        "lag": lag,
        "seconds": result.seconds,
        "before": result.eval_before,
        "after": result.eval_after,
    }
    (trainer.folder.path / "summary.json").write_text(json.dumps(summary, indent=2))
    click.echo(json.dumps(summary))


def shown(row: dict[str, Any]) -> str:
    names = ("step", "reward", "eval_reward", "valid", "failed", "staleness_mean", "wait_seconds", "train_seconds")
    return json.dumps({key: row[key] for key in names if key in row})


def summarise(folder: Path, utilisation: float | None) -> dict[str, Any]:
    """Return rates and shares of time of a training run."""
    rows = [row for row in read_metrics(folder) if row.get("reward") is not None]
    seconds = {key: sum(row[f"{key}_seconds"] for row in rows) for key in ("wait", "train", "sync")}
    total = sum(seconds.values())
    return {
        "steps": len(rows),
        "first": mean(row["reward"] for row in rows[:5]),
        "last": mean(row["reward"] for row in rows[-10:]),
        "first_step_above_0.8": next((row["step"] for row in rows if row["reward"] >= 0.8), None),
        "rollouts_per_second": sum(row["rollouts"] for row in rows) / total,
        "sampled_tokens_per_second": sum(row["sampled_tokens"] for row in rows) / total,
        "trained_tokens_per_second": sum(row["tokens"] for row in rows) / total,
        "shares": {key: value / total for key, value in seconds.items()},
        "gpu_utilisation_percent": utilisation,
        "staleness_mean": mean(row["staleness_mean"] for row in rows),
        "staleness_max": max(row["staleness_max"] for row in rows),
    }


class GpuUtilisation:
    """Reads the GPU's utilisation every second, with nvidia-smi, while the block runs."""

    def __init__(self) -> None:
        self.readings: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def mean(self) -> float | None:
        return mean(self.readings) if self.readings else None

    def __enter__(self) -> "GpuUtilisation":
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-l", "1"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self.readings.extend(int(line) for line in self._process.stdout if line.strip().isdigit())

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


if __name__ == "__main__":
    main()
