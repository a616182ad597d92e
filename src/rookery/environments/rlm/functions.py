"""The functions that a model's code in a REPL can call, such as `llm` and `answer`; the same for Python and bash.

They run in the runner process. The last answer that was set counts, even if the cell that set it failed
afterwards.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rookery.environments.rlm.budget import CallFailed
from rookery.environments.rlm.call_tree import CallTree, SubCall
from rookery.environments.rlm.contexts import MAX_FILE
from rookery.environments.rlm.tool_calls import bind_arguments, call_tool, to_plain_data
from rookery.environments.text import render
from rookery.environments.tools import Tool
from rookery.sandboxes.protocol import Sandbox

MAX_BATCH = 10_000
MAX_ANSWER = 1 << 20


class ReplFunctions:
    """The functions of one REPL.

    `depth` is the REPL's depth in the tree of model calls; the root model's is 0. `tools` are the environment's
    tools, and `sandbox` is the REPL's.
    """

    def __init__(self, tree: CallTree, depth: int, tools: Mapping[str, Tool], sandbox: Sandbox) -> None:
        self.tree = tree
        self.depth = depth
        self.tools = dict(tools)
        self.answered = False
        """True if the code has set the final answer."""
        self.value = ""
        """The final answer, if `answered`."""
        self._sandbox = sandbox

    async def llm(self, prompt: str, system: str | None = None, max_tokens: int | None = None) -> str:
        """Call a sub-model and return its reply."""
        return await self.tree.call(self._make_request(prompt, system, max_tokens))

    async def llm_batch(
        self, prompts: list[str], system: str | None = None, max_tokens: int | None = None
    ) -> list[dict[str, str]]:
        """Call a sub-model with each prompt, concurrently. Each result is `{"text": …}` or `{"error": …}`."""
        if not isinstance(prompts, list | tuple):
            raise CallFailed("llm_batch takes a list of prompts")
        if len(prompts) > MAX_BATCH:
            raise CallFailed(f"the batch has {len(prompts)} prompts; the maximum is {MAX_BATCH}")
        results = await self.tree.call_all([self._make_request(prompt, system, max_tokens) for prompt in prompts])
        return [{"text": result} if isinstance(result, str) else {"error": str(result)} for result in results]

    async def rlm(self, prompt: str, context: Any = None, file: str | None = None) -> str:
        """Call a sub-model that has its own REPL, and return its answer.

        It works on `context`, or on the content of `file` in this REPL's sandbox.
        """
        if context is not None and file is not None:
            raise CallFailed("rlm takes a context or a file, not both")
        if file is not None:
            context = await self._sandbox.read(_check_text("file", file), limit=MAX_FILE, timeout=60.0)
        request = self._make_request(prompt, None, None)
        return await self.tree.call(msgspec.structs.replace(request, context=context, recursive=True))

    async def budget(self) -> dict[str, Any]:
        """Return what is left of the rollout's budget of calls, depth, tokens and seconds."""
        return self.tree.left(self.depth)

    async def answer(self, value: Any) -> None:
        """Set the final answer of this REPL's model. A later call replaces it."""
        text = render(value)
        if len(text) > MAX_ANSWER:
            raise CallFailed(f"the answer has {len(text)} characters; the maximum is {MAX_ANSWER}")
        self.answered, self.value = True, text

    async def tool(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a tool of the environment and return its result as JSON-compatible data."""
        tool = self.tools[name]
        return to_plain_data(await call_tool(self.tree.ctx, tool, bind_arguments(tool, args, kwargs)))

    def _make_request(self, prompt: Any, system: Any, max_tokens: Any) -> SubCall:
        if max_tokens is not None and (
            isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1
        ):
            raise CallFailed(f"max_tokens must be an integer above 0, not {max_tokens!r:.40}")
        if system is not None:
            system = _check_text("system", system)
        return SubCall(
            prompt=_check_text("prompt", prompt), system=system, max_tokens=max_tokens, depth=self.depth + 1
        )


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise CallFailed(f"{name} must be a string, not {type(value).__name__}")
    return value.encode("utf-8", "replace").decode()
