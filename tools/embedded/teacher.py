"""A teacher that solves arithmetic problems with the tool `python` and makes more mistakes on harder problems.

Guarantees:
- a dialogue starts with exactly the token IDs that a rollout of the environment starts with;
- tool results in a dialogue are those of the real tool;
- its mistakes are those of a reader (a skipped sentence, a detail taken for a step, a wrong sign, a wrong digit, a
  missing bracket) and are drawn anew each time, so that the correct solution is always the most likely one.
"""

import re
import string
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import msgspec

from embedded.programs import run_tool_call
from rookery.core import Message, Task, ToolCall, derive_seed
from rookery.environments.arithmetic import LEVELS, Arithmetic
from rookery.environments.arithmetic.problems import Problem, draw_problem, get_split
from rookery.upstreams.embedded import chat

SLIP_RATES: Final = {1: 0.0, 2: 0.24, 3: 0.32, 4: 0.37, 5: 0.42}
"""Probability that a sentence of a story is misread, by level."""
MISREAD_RATES: Final = {1: 0.0, 2: 0.10, 3: 0.32, 4: 0.37, 5: 0.42}
"""Probability that two numbers of an expression are misread. It is low at level 2, or the policy errs on level
1."""
DISTRACTED_RATE: Final = 0.4
"""Probability that a sentence that changes nothing is taken for a step."""
GUESS_RATES: Final = {1: 0.0, 2: 0.02, 3: 0.04, 4: 0.06, 5: 0.08}
"""Probability that the answer is guessed without the tool."""
GIVE_UP_RATE: Final = 0.25
_TRIES: Final = 3
_LETTERS: Final = string.printable[:95]
_SWAPPED: Final = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//"}
_OPERATOR: Final = re.compile(r"//|[-+*%]")
_NUMBER: Final = re.compile(r"\d+")


class Dialogue(NamedTuple):
    ids: list[int]
    is_assistant: list[bool]
    """Which IDs belong to the assistant."""


class Teacher:
    """Generates dialogues from a seed."""

    def __init__(self, seed: int, env: Arithmetic | None = None) -> None:
        self.env = env or Arithmetic()
        self.rng = Random(derive_seed(seed, "teacher"))  # noqa: S311

    def exercises(self, count: int) -> Iterator[Dialogue]:
        """Yield short texts to repeat. Copying is learned first, because everything else builds on it."""
        for _ in range(count):
            text = "".join(self.rng.choices(_LETTERS, k=self.rng.randrange(5, 40)))
            question = chat.message_ids(Message("user", text))
            answer = chat.message_ids(Message("assistant", text))
            yield Dialogue([*question, *answer], [False] * (len(question) + 1) + [True] * (len(answer) - 1))

    def dialogues(self, count: int, hardest: int = 5) -> Iterator[Dialogue]:
        """Yield `count` dialogues with alternating levels, from problems of the train split only."""
        for index in range(count):
            level = LEVELS[index % hardest]
            problem = draw_problem(self.rng, level)
            while get_split(problem.prompt) != "train":
                problem = draw_problem(self.rng, level)
            yield self.dialogue(problem)

    def dialogue(self, problem: Problem) -> Dialogue:
        ids = prompt_ids(self.env, Message("user", problem.prompt))
        is_assistant = [False] * len(ids)
        for message in self.solve(problem):
            more = chat.message_ids(message)
            if message.role == "assistant":
                ids += more[1:]  # the role token is already there
                is_assistant += [True] * (len(more) - 1)
            else:
                ids += (*more, chat.ASSISTANT)
                is_assistant += [False] * (len(more) + 1)
        return Dialogue(ids, is_assistant)

    def solve(self, problem: Problem) -> Iterator[Message]:
        """Yield the messages after the prompt."""
        rng = self.rng
        if rng.random() < GUESS_RATES[problem.level]:
            yield final_message(str(max(0, problem.answer + rng.randrange(-20, 21))))
            return
        for _ in range(_TRIES):
            arguments = msgspec.json.encode({"code": self.write_program(problem)}).decode()
            yield Message("assistant", None, (ToolCall("", "python", arguments),))
            result = run_tool_call("python", arguments, self.env.max_result)
            yield Message("tool", result)
            if "Error" not in result:
                yield final_message(result.strip())
                return
            if rng.random() < GIVE_UP_RATE:
                break
        yield Message("assistant", "I do not know.")

    # -------------------------------------------------------------------------------------------- programs

    def write_program(self, problem: Problem) -> str:
        slip, misread = SLIP_RATES[problem.level], MISREAD_RATES[problem.level]
        if problem.kind in ("expression", "brackets"):
            code = problem.statements[0].code
            for _ in range((len(_NUMBER.findall(code)) + 1) // 2):
                if self.rng.random() < misread:
                    code = self.misread(code)
            return f"print({code})"
        lines = []
        for number, line in enumerate(problem.statements):
            if not line.matters:
                if self.rng.random() < DISTRACTED_RATE:
                    lines.append(line.code)
            elif self.rng.random() >= slip:
                lines.append(line.code)
            elif number == 0:
                lines.append(self.mistype_digit(line.code))
            else:
                kind = self.rng.random()
                if kind < 0.4:
                    continue
                lines.append(self.swap_operator(line.code) if kind < 0.75 else self.mistype_digit(line.code))
        end = "print(x" if self.rng.random() < slip / 4 else "print(x)"
        return "\n".join([*lines, end])

    def misread(self, code: str) -> str:
        """Return an expression with one mistake."""
        kind = self.rng.random()
        if "(" in code and ")" in code and kind < 0.5:
            if kind < 0.25:
                at = code.rindex(")")
                return code[:at] + code[at + 1 :]
            return code.replace("(", "", 1).replace(")", "", 1)
        return self.swap_operator(code) if kind < 0.7 else self.mistype_digit(code)

    def swap_operator(self, code: str) -> str:
        found = list(_OPERATOR.finditer(code))
        if not found:
            return self.mistype_digit(code)
        at = self.rng.choice(found)
        return code[: at.start()] + _SWAPPED[at[0]] + code[at.end() :]

    def mistype_digit(self, code: str) -> str:
        at = self.rng.choice(list(_NUMBER.finditer(code)))
        digit_index = self.rng.randrange(len(at[0]))
        # Never a leading zero, which Python rejects.
        digit = self.rng.choice("123456789")
        return code[: at.start() + digit_index] + digit + code[at.start() + digit_index + 1 :]


def final_message(number: str) -> Message:
    return Message("assistant", f"The answer is {number}.")


def prompt_ids(env: Arithmetic, *prompt: Message) -> list[int]:
    """Return the IDs at the start of a rollout, as the environment sends them."""
    ctx = cast(Any, SimpleNamespace(task=Task(id="t", prompt=prompt)))
    return chat.prompt(env.messages(ctx), env.tools()).ids
