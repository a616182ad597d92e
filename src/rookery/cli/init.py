"""`rookery init`: create a first environment.

Guarantees:
- the created environment runs without changes against any OpenAI-compatible server;
- an existing file is never changed.
"""

import keyword
import re
from pathlib import Path

import click

from rookery.cli.terminal import bold, dim, program_name, shell_quote
from rookery.core import UsageError

_ENVIRONMENT = '''\
"""{title}: arithmetic word problems with a Python tool and a tool of its own. A starting point."""

from pathlib import Path

from rookery import Context, Taskset, ToolEnvironment, load_tasks, tool
from rookery.scorers import NumericMatch


@tool
def multiply(a: float, b: float) -> float:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class {title}(ToolEnvironment):
    """The policy may call the tools until it answers; the last number of its answer is compared."""

    toolset = ["python", multiply]  # python runs the policy's programs in a sandbox
    system_prompt = "Use the tools. End with the number."

    def tasks(self) -> Taskset:
        return load_tasks(Path(__file__).with_name("tasks.jsonl"))

    async def score(self, ctx: Context) -> float:
        return await NumericMatch().score(ctx.submission(self.answer(ctx)))
'''

_TASKS = """\
{"id": "sum", "prompt": "What is 24 + 17?", "answer": 41}
{"id": "product", "prompt": "What is 12 * 8?", "answer": 96}
{"id": "apples", "prompt": "Mia has 12 apples. Mia buys 30 more. How many apples does Mia have?", "answer": 42}
{"id": "boxes", "prompt": "A box holds 24 pencils. How many pencils are in 17 boxes?", "answer": 408}
"""


@click.command(short_help="Create a first environment.")
@click.argument("name", metavar="NAME")
@click.argument("folder", metavar="[DIR]", required=False)
def init(name: str, folder: str | None) -> int:
    """Create NAME.py and tasks.jsonl, a small working environment, in DIR (by default a new directory NAME)."""
    module = re.sub(r"[^0-9a-zA-Z]+", "_", name.removesuffix(".py")).strip("_").lower()
    if not module or not module.isidentifier() or keyword.iskeyword(module):
        raise UsageError(
            f"{name!r} cannot name an environment: use letters, digits and _, beginning with a letter"
        )
    title = "".join(word.capitalize() for word in module.split("_"))
    target = Path(folder) if folder is not None else Path(module)
    files = {
        target / f"{module}.py": _ENVIRONMENT.replace("{title}", title),
        target / "tasks.jsonl": _TASKS,
    }
    there = [path for path in files if path.exists() or path.is_symlink()]
    if there:
        raise UsageError(f"{there[0]} exists and is not overwritten: choose another name or directory")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write into {target}: {error.strerror}") from error
    made = shell_quote(target / f"{module}.py")
    rows = [
        f"created {', '.join(shell_quote(path) for path in files)}",
        "",
        f"  {dim('# run it with the embedded policy; add --dry-run to see what would run')}",
        f"  {bold(f'{program_name()} run {made} --policy embedded -k 4')}",
        f"  {dim('# or with your own model')}",
        f"  {bold(f'{program_name()} run {made} --policy http://localhost:8000/v1 -k 4')}",
    ]
    click.echo("\n".join(rows))
    return 0
