"""What code in a REPL can ask for: the same for Python and bash.

Promises:
- arguments are checked, and what is wrong with them is said to the code that called;
- an answer is plain data, set once or again: the last one counts, and it outlives the cell that set it;
- a failed call of a batch costs its own place, which then says why.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from rookery.environments.results import render
from rookery.environments.rlm.budgets import CallFailed
from rookery.environments.rlm.tooling import called, named, plain
from rookery.environments.rlm.tree import Asked, Tree
from rookery.environments.schemas import Tool

MOST_BATCH = 10_000
MOST_ANSWER = 1 << 20

ReadFile: TypeAlias = Callable[[str], Awaitable[bytes]]


class Verbs:
    """Of one REPL, at its depth."""

    def __init__(self, tree: Tree, depth: int, tools: Mapping[str, Tool]) -> None:
        self.tree = tree
        self.depth = depth
        self.tools = dict(tools)
        self.answered = False
        self.value = ""
        self.read_file: ReadFile | None = None

    async def llm(self, prompt: str, system: str | None = None, max_tokens: int | None = None) -> str:
        return await self.tree.ask(self._asked(prompt, system, max_tokens))

    async def llm_batch(
        self, prompts: list[str], system: str | None = None, max_tokens: int | None = None
    ) -> list[dict[str, str]]:
        """Each is `{"text": …}` or `{"error": …}`."""
        if not isinstance(prompts, list | tuple):
            raise CallFailed("llm_batch takes a list of prompts")
        if len(prompts) > MOST_BATCH:
            raise CallFailed(f"a batch of {len(prompts)} prompts; {MOST_BATCH} is the most")
        found = await self.tree.ask_all([self._asked(prompt, system, max_tokens) for prompt in prompts])
        return [{"text": one} if isinstance(one, str) else {"error": str(one)} for one in found]

    async def rlm(self, prompt: str, context: Any = None, file: str | None = None) -> str:
        """A sub-model with a REPL of its own, over data or over a file of this REPL."""
        if context is not None and file is not None:
            raise CallFailed("rlm takes a context or a file, not both")
        if file is not None:
            if self.read_file is None:
                raise CallFailed("rlm cannot read files here")
            context = await self.read_file(_text("file", file))
        asked = self._asked(prompt, None, None)
        return await self.tree.ask(msgspec.structs.replace(asked, context=context, recursive=True))

    async def budget(self) -> dict[str, Any]:
        return self.tree.left(self.depth)

    async def answer(self, value: Any) -> None:
        text = render(value)
        if len(text) > MOST_ANSWER:
            raise CallFailed(f"an answer of {len(text)} characters; {MOST_ANSWER} is the most")
        self.answered, self.value = True, text

    async def tool(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tool = self.tools[name]
        return plain(await called(self.tree.ctx, tool, named(tool, args, kwargs)))

    def _asked(self, prompt: Any, system: Any, max_tokens: Any) -> Asked:
        if max_tokens is not None and (
            isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1
        ):
            raise CallFailed(f"max_tokens must be a whole number above 0, not {max_tokens!r:.40}")
        if system is not None:
            system = _text("system", system)
        return Asked(prompt=_text("prompt", prompt), system=system, max_tokens=max_tokens, depth=self.depth + 1)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise CallFailed(f"{name} must be a text, not {type(value).__name__}")
    return value.encode("utf-8", "replace").decode()
