"""Large runs, for the tests and measurements of the viewer."""

import json
from pathlib import Path

from rookery.core import Attempt, Failed, Message, Rollout, Task, Timing, ToolCall, Turn, Usage, floats, ints
from rookery.core.outcomes import Completed
from rookery.journal import Journal
from tests.view.view_kit import make_run


def make_big_table(folder: Path, count: int, *, k: int = 8) -> Path:
    """Create a run with `count` rollouts and no transcripts; every 50th failed."""
    folder.mkdir(parents=True)
    (folder / "tokens").mkdir()
    lost = Failed("infra", "sandbox.lost", "the sandbox was lost")
    with Journal.create(folder, {"seed": 1}, env="sums", model="scripted") as journal:
        for group in range(count // k):
            task = f"task-{group % 997:03}"
            journal.add_tasks([Task(id=task)], start=group)
            journal.add_group(group, stream="main", position=group, task=group, k=k)
            for member in range(k):
                number = group * k + member
                failed = number % 50 == 7
                outcome = lost if failed else Completed()
                start = 1_700_000_000.0 + group * 0.5
                attempt = Attempt(
                    id=f"{group}.{member}.1", number=1, outcome=outcome, started=start, ended=start + 3
                )
                journal.add_rollout(
                    Rollout(
                        id=f"{group}.{member}",
                        group=group,
                        member=member,
                        task=task,
                        outcome=outcome,
                        reward=None if failed else (number * 7919 % 101) / 100,
                        metrics={"level": float(group % 5), "length": float(number % 777)},
                        attempts=(attempt,),
                        usage=Usage(turns=3, prompt_tokens=900, sampled_tokens=number % 400, tool_calls=2),
                        timing=Timing(queue=0.1, run=2.5, score=0.3, model=1.8, sandbox=0.4),
                    )
                )
        journal.end("finished")
    return folder


def make_long_rollout(folder: Path, turns: int, size: int) -> Path:
    """Create a run with one rollout of many turns whose texts have `size` characters in all."""
    line = "def step(value: int) -> int:  # a line of a tool's output\n"
    text = (line * (size // turns // len(line) + 1))[: size // turns - 400]
    made: list[Turn] = []
    for index in range(turns):
        call = ToolCall(f"c{index}", "bash", json.dumps({"command": f"cat file_{index}.py | head -n 50"}))
        message = Message("tool", f"output {index}\n{text}", tool_call_id=f"c{index - 1}")
        made.append(
            Turn(
                attempt="0.0.1",
                index=index,
                parent=index - 1 if index else None,
                messages=(message,) if index else (Message("user", "Repair the program."),),
                response=Message(
                    "assistant", f"Step {index}.", (call,), reasoning="I look at the next file. " * 8
                ),
                prefix=index * 15,
                prompt=ints(range(5)),
                sampled=ints(range(10)),
                logprobs=floats([-0.1] * 10),
                prompt_tokens=index * 15 + 5,
                sampled_tokens=10,
                started=1_700_000_000.0 + index * 0.01,
                seconds=0.008,
                finish="tool_calls",
            )
        )
    return make_run(folder, {"long": [1.0]}, turns={"0.0": made})
