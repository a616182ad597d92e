"""A teacher that solves arithmetic through `python`, and errs: the more, the harder the problem.

Promises:
- a dialogue begins with the very ids that a rollout of the environment begins with;
- what the tool answers in a dialogue is what the real one would;
- its mistakes are those of a reader (a sentence skipped, a detail taken for a step, a sign mixed up, a digit
  mistyped, a bracket forgotten), drawn anew each time: the right way is always the most likely one.
"""

import re
import string
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import msgspec

from embedded.programs import observation
from rookery.core import Message, Task, ToolCall, derive_seed
from rookery.environments.arithmetic import LEVELS, Arithmetic
from rookery.environments.arithmetic.problems import Problem, draw_problem, get_split
from rookery.upstreams.embedded import chat

SLIPS: Final = {1: 0.0, 2: 0.20, 3: 0.29, 4: 0.34, 5: 0.42}
"""How often a sentence of a story goes wrong, by level."""
MISREAD: Final = {1: 0.0, 2: 0.06, 3: 0.29, 4: 0.34, 5: 0.42}
"""How often two numbers of an expression do. Few at level 2, or the policy errs on level 1 as well."""
FOOLED: Final = 0.4
"""How often a sentence that changes nothing is taken for a step."""
BY_HEAD: Final = {1: 0.0, 2: 0.02, 3: 0.04, 4: 0.06, 5: 0.08}
"""How often the answer is guessed without the tool."""
GIVES_UP: Final = 0.25
_TRIES: Final = 3
_LETTERS: Final = string.printable[:95]
_SWAPPED: Final = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//"}
_OPERATOR: Final = re.compile(r"//|[-+*%]")
_NUMBER: Final = re.compile(r"\d+")


class Dialogue(NamedTuple):
    ids: list[int]
    said: list[bool]
    """Which of the ids are the assistant's."""


class Teacher:
    """Makes dialogues, one after the other, from a seed."""

    def __init__(self, seed: int, env: Arithmetic | None = None) -> None:
        self.env = env or Arithmetic()
        self.rng = Random(derive_seed(seed, "teacher"))  # noqa: S311

    def exercises(self, count: int) -> Iterator[Dialogue]:
        """Short texts to be said again: what copying, on which everything else rests, is learned from first."""
        for _ in range(count):
            text = "".join(self.rng.choices(_LETTERS, k=self.rng.randrange(5, 40)))
            asked = chat.message_ids(Message("user", text))
            answered = chat.message_ids(Message("assistant", text))
            yield Dialogue([*asked, *answered], [False] * (len(asked) + 1) + [True] * (len(answered) - 1))

    def dialogues(self, count: int, hardest: int = 5) -> Iterator[Dialogue]:
        """So many of them, the levels in turn, from problems of the train split only."""
        for index in range(count):
            level = LEVELS[index % hardest]
            problem = draw_problem(self.rng, level)
            while get_split(problem.prompt) != "train":
                problem = draw_problem(self.rng, level)
            yield self.dialogue(problem)

    def dialogue(self, problem: Problem) -> Dialogue:
        ids = prompt_ids(self.env, Message("user", problem.prompt))
        said = [False] * len(ids)
        for message in self.play(problem):
            more = chat.message_ids(message)
            if message.role == "assistant":
                ids += more[1:]  # its role is already there
                said += [True] * (len(more) - 1)
            else:
                ids += (*more, chat.ASSISTANT)
                said += [False] * (len(more) + 1)
        return Dialogue(ids, said)

    def play(self, problem: Problem) -> Iterator[Message]:
        """The messages after the prompt."""
        rng = self.rng
        if rng.random() < BY_HEAD[problem.level]:
            yield final(str(max(0, problem.answer + rng.randrange(-20, 21))))
            return
        for _ in range(_TRIES):
            arguments = msgspec.json.encode({"code": self.program(problem)}).decode()
            yield Message("assistant", None, (ToolCall("", "python", arguments),))
            seen = observation("python", arguments, self.env.max_result)
            yield Message("tool", seen)
            if "Error" not in seen:
                yield final(seen.strip())
                return
            if rng.random() < GIVES_UP:
                break
        yield Message("assistant", "I do not know.")

    # -------------------------------------------------------------------------------------------- programs

    def program(self, problem: Problem) -> str:
        slip, misread = SLIPS[problem.level], MISREAD[problem.level]
        if problem.kind in ("expression", "brackets"):
            code = problem.statements[0].code
            for _ in range((len(_NUMBER.findall(code)) + 1) // 2):
                if self.rng.random() < misread:
                    code = self.misread(code)
            return f"print({code})"
        lines = []
        for number, line in enumerate(problem.statements):
            if not line.matters:
                if self.rng.random() < FOOLED:
                    lines.append(line.code)
            elif self.rng.random() >= slip:
                lines.append(line.code)
            elif number == 0:
                lines.append(self.mistyped(line.code))
            else:
                kind = self.rng.random()
                if kind < 0.4:
                    continue
                lines.append(self.swapped(line.code) if kind < 0.75 else self.mistyped(line.code))
        end = "print(x" if self.rng.random() < slip / 4 else "print(x)"
        return "\n".join([*lines, end])

    def misread(self, code: str) -> str:
        """An expression with one mistake in it."""
        kind = self.rng.random()
        if "(" in code and ")" in code and kind < 0.5:
            if kind < 0.25:
                at = code.rindex(")")
                return code[:at] + code[at + 1 :]
            return code.replace("(", "", 1).replace(")", "", 1)
        return self.swapped(code) if kind < 0.7 else self.mistyped(code)

    def swapped(self, code: str) -> str:
        found = list(_OPERATOR.finditer(code))
        if not found:
            return self.mistyped(code)
        at = self.rng.choice(found)
        return code[: at.start()] + _SWAPPED[at[0]] + code[at.end() :]

    def mistyped(self, code: str) -> str:
        at = self.rng.choice(list(_NUMBER.finditer(code)))
        place = self.rng.randrange(len(at[0]))
        # Never a leading zero, which Python would not take.
        digit = self.rng.choice("123456789")
        return code[: at.start() + place] + digit + code[at.start() + place + 1 :]


def final(number: str) -> Message:
    return Message("assistant", f"The answer is {number}.")


def prompt_ids(env: Arithmetic, *prompt: Message) -> list[int]:
    """How a rollout begins, as the environment itself would send it."""
    ctx = cast(Any, SimpleNamespace(task=Task(id="t", prompt=prompt)))
    return chat.prompt(env.messages(ctx), env.tools()).ids
