"""`rookery tasks`: list, show and convert tasks.

Guarantees:
- every problem of every task is printed; the exit code is 3 if a task cannot be attempted;
- tests and solutions are printed only with `--tests`;
- the text of a task cannot move the cursor or change colours of the terminal;
- `convert` overwrites no file, and prints what each task loses in the conversion.
"""

from typing import TYPE_CHECKING, Any

import click

from rookery.cli.errors import Exit
from rookery.cli.options import PluginName, option, parse_source_options, source_options
from rookery.cli.tasks_cache import list_cache, prune

if TYPE_CHECKING:
    from rookery.core import Task
    from rookery.tasks.loader import LoadedTasks
    from rookery.tasks.report import TaskProblem
    from rookery.tasks.swe import FileMapping, SweStep, SweTask

_HELP = """List, show and convert tasks that run in sandboxes.

\b
  rookery tasks list ./task-data                           list all tasks and their problems
  rookery tasks show hf:owner/dataset fix-parser           show one task
  rookery tasks convert ./task-data rows.jsonl --to rows   write them in another format
  rookery tasks prune --unused 30                          remove files not used for 30 days from the cache

SOURCE is a directory of tasks in an installed format, one task, an archive of tasks,
hf:OWNER/DATASET[@REVISION][:PATH] or a file of rows. The exit code is 3 if some tasks cannot be attempted.
"""
_BROKEN = Exit.FAILED
_SHOWN = 4_000

_source = click.argument("source", metavar="SOURCE")


@click.group(help=_HELP, short_help="List, show and convert tasks.")
def tasks() -> None:
    pass


tasks.add_command(list_cache)
tasks.add_command(prune)


@tasks.command(name="list", short_help="List all tasks and their problems.")
@_source
@source_options
@option("--json", is_flag=True, help="Print one JSON object per task.")
def list_(source: str, json: bool, **values: Any) -> int:
    """List all tasks of SOURCE and their problems."""
    import msgspec

    from rookery.cli.terminal import bold, dim, format_table, one_line, plural

    loaded = _load(source, values)
    found = _group_by_task(loaded)
    if json:
        for task in loaded.tasks:
            click.echo(msgspec.json.encode({**_describe_task(task), "problems": found.pop(task.id, [])}))
        for name, rest in found.items():  # directories that are not tasks
            click.echo(msgspec.json.encode({"id": name, "format": "", "problems": rest}))
        return 0 if loaded.report.ok else _BROKEN
    rows = [[dim(word) for word in ("task", "format", "image", "steps", "problems")]]
    for task in loaded.tasks:
        row, mine = _describe_task(task), found.get(task.id, [])
        wrong = sum(not one.warning for one in mine)
        warned = len(mine) - wrong
        counts = [click.style(plural(wrong, "problem"), fg="red")] if wrong else []
        counts += [plural(warned, "warning")] if warned else []
        steps = str(row["steps"]) if row["steps"] else ""
        rows.append(
            [
                bold(one_line(task.id, 60)),
                one_line(row["format"], 20),
                one_line(row["image"] or "", 50),
                steps,
                ", ".join(counts),
            ]
        )
    click.echo("\n".join(format_table(rows, right=frozenset({3}))))
    for problem in loaded.report.problems:
        click.echo(click.style(one_line(str(problem), 1_000), fg=None if problem.warning else "red"), err=True)
    report = loaded.report
    click.echo(dim(f"{plural(report.tasks, 'task')}, {len(report.broken)} broken"), err=True)
    return 0 if report.ok else _BROKEN


@tasks.command(short_help="Show one task.")
@_source
@click.argument("name", metavar="TASK")
@source_options
@option("--tests", is_flag=True, help="Also show its tests and its solution.")
@option("--json", is_flag=True, help="Print one JSON object.")
def show(source: str, name: str, tests: bool, json: bool, **values: Any) -> int:
    """Show the task TASK of SOURCE. Its tests and its solution are shown only with --tests."""
    import msgspec

    from rookery.cli.terminal import escape_controls, one_line
    from rookery.core import UsageError
    from rookery.tasks.swe import DATA_KEY, get_swe_task

    loaded = _load(source, values)
    task = next((one for one in loaded.tasks if one.id == name), None)
    if task is None:
        from difflib import get_close_matches

        near = get_close_matches(name, [one.id for one in loaded.tasks], 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"`rookery tasks list {source}` lists them"
        raise UsageError(f"{source} has no task {name!r}: {hint}")
    mine = _group_by_task(loaded).get(name, [])
    code = _BROKEN if task.invalid else 0
    swe = get_swe_task(task) if DATA_KEY in task.data else None
    if json:
        data = {"task": task, "problems": mine}
        if tests and swe is not None:
            data["steps"] = [
                {"tests": _read_parts(step.tests), "solution": _read_parts(step.solution)} for step in swe.steps
            ]
        click.echo(msgspec.json.encode(data))
        return code
    if swe is not None:
        _print_swe_task(swe, tests)
    elif not task.invalid:
        click.echo(one_line(task.id, 200))
        click.echo(escape_controls(task.text[:_SHOWN]))
    for problem in mine:
        click.echo(one_line(str(problem), 1_000), err=True)
    return code


@tasks.command(short_help="Write tasks in another format.")
@_source
@click.argument("target", metavar="TARGET")
@option("--to", "to", type=PluginName("task_formats", "rows"), required=True, help="Format to write.")
@source_options
@option("--json", is_flag=True, help="Print one JSON object per task.")
def convert(source: str, target: str, to: str, json: bool, **values: Any) -> int:
    """Write the tasks of SOURCE to TARGET: a new directory of task directories, or a new file of rows."""
    import msgspec

    from rookery.cli.terminal import one_line, plural, relative_path
    from rookery.tasks.conversion import convert as converted

    done = converted(_load(source, values).tasks, target, to)
    left = sum(bool(one.problem) for one in done)
    for one in done:
        if json:
            click.echo(msgspec.json.encode(one))
            continue
        name = one_line(one.task, 60)
        if one.problem:
            click.echo(click.style(f"{name}: left out: {one_line(one.problem, 500)}", fg="red"), err=True)
        if one.lost:
            click.echo(f"{name}: lost: {one_line(', '.join(one.lost), 500)}", err=True)
        if one.rookery_only:
            click.echo(
                f"{name}: kept where only Rookery reads it: {one_line(', '.join(one.rookery_only), 500)}", err=True
            )
    if not json:
        from pathlib import Path

        click.echo(f"{plural(len(done) - left, 'task')} as {to} in {relative_path(Path(target).expanduser())}")
    return _BROKEN if left else 0


def _load(source: str, values: dict[str, Any]) -> "LoadedTasks":
    from rookery.tasks.loader import read_tasks

    return read_tasks(source, **parse_source_options(values))


def _group_by_task(loaded: "LoadedTasks") -> "dict[str, list[TaskProblem]]":
    found: dict[str, list[TaskProblem]] = {}
    for problem in loaded.report.problems:
        found.setdefault(problem.task, []).append(problem)
    return found


def _describe_task(task: "Task") -> dict[str, Any]:
    from rookery.tasks.swe import DATA_KEY

    swe = task.data.get(DATA_KEY, {})
    return {
        "id": task.id,
        "format": swe.get("format", "" if task.invalid else "prompt"),
        "image": task.image,
        "steps": len(swe.get("steps", ())),
        "broken": bool(task.invalid),
    }


def _print_swe_task(task: "SweTask", tests: bool) -> None:
    from rookery.cli.terminal import bold, dim, escape_controls, format_table, one_line

    rows = [
        ("format", task.format),
        ("directory", task.folder),
        ("image", task.image or "(set by the run)"),
        ("workdir", task.workdir),
        ("network", ", ".join((task.network, *task.allow))),
        ("user", task.user or ""),
        ("limits", ", ".join(_format_limits(task))),
        ("env", ", ".join(sorted(task.env))),
        ("MCP", ", ".join(str(one.get("name")) for one in task.mcp)),
        ("artifacts", ", ".join(task.artifacts)),
        ("files", _count_files(task.files)),
    ]
    click.echo(bold(one_line(task.id, 200)))
    click.echo(
        "\n".join(format_table([[dim(name), one_line(text, 300)] for name, text in rows if text], indent="  "))
    )
    for number, step in enumerate(task.steps, 1):
        title = (
            f"step {number}" + (f", {step.name}" if step.name else "") if len(task.steps) > 1 else "instruction"
        )
        click.echo(f"\n{bold(title)}\n{escape_controls(step.instruction[:_SHOWN]).rstrip()}\n")
        click.echo(
            "\n".join(
                format_table(
                    [[dim(name), one_line(text, 300)] for name, text in _describe_step(step)], indent="  "
                )
            )
        )
        if tests:
            for kind, parts in (("tests", step.tests), ("solution", step.solution)):
                for path, text in _read_parts(parts).items():
                    click.echo(f"\n{dim(f'{kind}: {one_line(path, 300)}')}\n{escape_controls(text).rstrip()}")


def _format_limits(task: "SweTask") -> list[str]:
    sizes = (("memory", task.memory), ("disk", task.disk))
    found = [f"{name} {value / (1 << 20):,.0f} MB" for name, value in sizes if value is not None]
    found += [f"{task.cpus:g} CPUs"] if task.cpus is not None else []
    return found + ([f"{task.gpus} GPUs"] if task.gpus else [])


def _describe_step(step: "SweStep") -> list[tuple[str, str]]:
    verifier = step.verifier
    where = "in a fresh sandbox" if verifier.mode == "fresh" else "in the agent's sandbox"
    facts = [
        ("agent", f"{step.timeout:g}s" if step.timeout is not None else ""),
        ("setup", "yes" if step.setup else ""),
        ("files", _count_files(step.files)),
        ("tests", f"{_count_files(step.tests)}, {verifier.script} for {verifier.timeout:g}s {where}"),
        ("solution", _count_files(step.solution) or "none"),
        ("minimum reward", f"{step.min_reward:g}" if step.min_reward is not None else ""),
    ]
    return [(name, text) for name, text in facts if text]


def _count_files(parts: "tuple[FileMapping, ...]") -> str:
    from rookery.cli.terminal import plural
    from rookery.tasks.file_trees import walk_files

    return plural(sum(1 for _ in walk_files(parts)), "file") if parts else ""


def _read_parts(parts: "tuple[FileMapping, ...]") -> dict[str, str]:
    """Return the text of the files by path. For a symbolic link, return its target; links are not followed."""
    import stat

    from rookery.cli.terminal import truncate_middle
    from rookery.tasks.file_trees import walk_files
    from rookery.tasks.symlinks import read_inside

    found = {}
    for piece in walk_files(parts):
        if stat.S_ISLNK(piece.info.st_mode):
            found[piece.path] = f"→ {piece.source.readlink()}"
        elif stat.S_ISREG(piece.info.st_mode):
            found[piece.path] = truncate_middle(
                read_inside(piece.source.parent, piece.source, 1 << 20).decode("utf-8", "replace"), 20_000
            )
    return found
