"""The texts that explain to a model how to use its REPL. Pure functions."""

from collections.abc import Mapping

from rookery.environments.rlm.contexts import PlacedContext
from rookery.environments.rlm.options import RlmOptions
from rookery.environments.tools import Tool

_TAGS = (
    "You work in a persistent {repl}. Write a cell between <code> and </code>; you then get its "
    "output{value} between <result> and </result>. Output over {output:,} characters is cut in the middle."
)
_TOOL = (
    "You work in a persistent {repl}, through the tool `repl`: it returns the cell's output{value}. "
    "Output over {output:,} characters is cut in the middle."
)
_PYTHON = (
    "Variables, functions and imports persist between cells. There is no network. In a cell you can call:\n"
    "- answer(value): sets your final answer; the task ends with that cell.\n"
    "- llm(prompt, system=None, max_tokens=None): asks a sub-model, which sees that prompt alone; returns its "
    "text.\n"
    "- llm_batch(prompts, system=None, max_tokens=None): asks many at once; returns their texts in order, None "
    "for one that failed.\n"
    "{rlm}"
    "- budget(): returns what is left of your budget."
)
_PYTHON_RLM = (
    "- rlm(prompt, context=None, file=None): asks a sub-model that has its own REPL, with the data or file as "
    "its context.\n"
)
_BASH = (
    "The working directory, variables and background jobs persist between cells. There is no network. These "
    "commands exist:\n"
    "- answer TEXT: sets your final answer (`-`: from its input); the task ends with that cell.\n"
    "- llm [--system TEXT] [--max-tokens N] PROMPT: asks a sub-model, which sees that prompt alone (`-`: from its "
    "input); prints its text.\n"
    "- llm --batch FILE: asks many at once, one for each line, or for each text of a JSON list; prints one JSON "
    "text for each line, null for one that failed.\n"
    "{rlm}"
    "- budget: prints what is left of your budget."
)
_BASH_RLM = "- rlm PROMPT [FILE]: asks a sub-model that has its own REPL, with the file as its context.\n"
_NONE = "Sub-models cannot be called here."
_END = "A message without a cell counts as your final answer."


def system_prompt(options: RlmOptions, tools: Mapping[str, Tool], placed: PlacedContext, depth: int) -> str:
    """Return the system prompt of a model at this depth in the tree of model calls; the root's depth is 0."""
    python = options.repl == "python"
    first = (_TAGS if options.style == "tags" else _TOOL).format(
        repl="Python" if python else "bash",
        value=" and the value of its last expression" if python else "",
        output=options.max_output,
    )
    deeper = options.max_depth - depth
    rlm = (_PYTHON_RLM if python else _BASH_RLM) if options.max_depth >= 2 and deeper >= 1 else ""
    parts = [first, (_PYTHON if python else _BASH).format(rlm=rlm)]
    if deeper < 1:
        parts.append(_NONE)
    if tools:
        parts.append("\n".join(_tool(tool, python=python) for tool in tools.values()))
    return "\n".join([*parts, placed.describe(options.repl), _END])


def _tool(tool: Tool, *, python: bool) -> str:
    names = tool.parameters.get("properties", {})
    call = f"{tool.name}({', '.join(names)})" if python else f"{tool.name} '{{JSON of {', '.join(names)}}}'"
    return f"- {call}: {tool.description}"


SUMMARISE = (
    "This conversation is about to be shortened. Write down, for yourself, what you have found out, which "
    "variables, functions and files hold what, and what is still to be done. Write no cell now."
)
SUMMARISED = "The conversation so far was shortened. The REPL is as it was. Your own summary:\n\n{summary}"
DROPPED = "[{count:,} characters of an earlier result were dropped]"
