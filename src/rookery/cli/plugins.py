"""Find the installed plug-ins, for help texts and for the command `rookery plugins`.

A plug-in is an entry point in a group whose name starts with `rookery.`. Names are not hard-coded here, so
plug-ins of a newly installed package appear in `run --help` and in `rookery plugins`.
"""

import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click
import msgspec

import rookery
from rookery.cli.options import option

PREFIX = "rookery."
LAUNCHER_FILES = Path(rookery.__file__).parent / "environments" / "agent" / "builtin"
"""Directory of the launchers that come with Rookery. They are TOML files and have no entry point."""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """An installed plug-in: an entry point of a package, or a launcher that comes with Rookery."""

    group: str
    """Group of the entry point without its prefix, for example `environments`."""
    name: str
    package: str
    """Name and version of the Python distribution that provides the plug-in."""
    target: str
    """Import path of the plug-in's object, as `module:attribute`; the file name for a launcher of Rookery."""
    description: str = ""
    error: str = ""
    """The reason why the plug-in's object cannot be imported; empty if it can."""


def list_plugins(group: str | None = None) -> list[Plugin]:
    """Import every installed plug-in and return descriptions, sorted by group and name.

    With `group`, only plug-ins of this group are returned. A plug-in that cannot be imported has its `error` set.
    """
    found = {(one.group, one.name): one for one in _read_launcher_files()}
    for one in map(_describe, _read_entry_points()):
        found.setdefault((one.group, one.name), one)
    return [one for _, one in sorted(found.items()) if group in (None, one.group)]


def list_names() -> dict[str, list[str]]:
    """Return the names of the installed plug-ins by group, without importing them."""
    found: dict[str, set[str]] = {"launchers": {path.stem for path in LAUNCHER_FILES.glob("*.toml")}}
    for point in _read_entry_points():
        found.setdefault(point.group.removeprefix(PREFIX), set()).add(point.name)
    return {group: sorted(names) for group, names in sorted(found.items())}


def _read_entry_points() -> Iterator[EntryPoint]:
    points = entry_points()
    for group in points.groups:
        if group.startswith(PREFIX):
            yield from points.select(group=group)


def _describe(point: EntryPoint) -> Plugin:
    from rookery.core.errors import describe

    description = error = ""
    try:
        description = _first_paragraph(point.load())
    except Exception as raised:  # noqa: BLE001  (a broken plug-in must not hide the others)
        error = describe(raised)
    dist = point.dist
    return Plugin(
        group=point.group.removeprefix(PREFIX),
        name=point.name,
        package=f"{dist.name} {dist.version}" if dist is not None else "",
        target=point.value,
        description=description,
        error=error,
    )


def _first_paragraph(value: Any) -> str:
    """Return the first paragraph of an object's docstring, as one line; of a mapping, its entry `about`."""
    if isinstance(value, Mapping):
        return str(value.get("about", ""))
    described = value if hasattr(value, "__name__") else type(value)
    return " ".join((described.__doc__ or "").strip().partition("\n\n")[0].split())


def _read_launcher_files() -> Iterator[Plugin]:
    """Yield the launchers that come with Rookery as TOML files."""
    for path in sorted(LAUNCHER_FILES.glob("*.toml")):
        yield Plugin(
            group="launchers",
            name=path.stem,
            package=f"rookery-rl {rookery.__version__}",
            target=path.name,
            description=str(tomllib.loads(path.read_text(encoding="utf-8")).get("about", "")),
        )


_HELP = """List the installed plug-ins: their group, their package and the start of their docstring.

A package adds a plug-in with an entry point in one of the groups listed here.
"""


@click.command(help=_HELP, short_help="List the installed plug-ins.")
@click.argument("group", metavar="[GROUP]", required=False)
@option("--json", is_flag=True, help="Print one JSON object per line.")
def plugins(group: str | None, json: bool) -> int:
    from rookery.cli.terminal import bold, dim, format_table, one_line, terminal_width
    from rookery.core import UsageError
    from rookery.core.errors import suggestion

    found = list_plugins()
    groups = list(dict.fromkeys(one.group for one in found))
    if group is not None:
        group = group.removeprefix(PREFIX)  # the listing prints the full name of the entry-point group
    if group is not None and group not in groups:
        raise UsageError(
            f"no plug-in group {group!r}: the groups are {', '.join(groups)}{suggestion(group, groups)}"
        )
    for name in groups if group is None else [group]:
        chosen = [one for one in found if one.group == name]
        if json:
            click.echo(b"\n".join(map(msgspec.json.encode, chosen)))
            continue
        rows = [
            [
                one.name,
                dim(one.package),
                click.style(f"cannot be imported: {one_line(one.error)}", fg="red")
                if one.error
                else one_line(one.description, terminal_width()),
            ]
            for one in chosen
        ]
        click.echo("\n".join([bold(f"{PREFIX}{name}"), *format_table(rows, indent="  "), ""]))
    return 0


class CommandWithPlugins(click.Command):
    """A click command whose help text ends with the names of the installed plug-ins."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Installed plug-ins (`rookery plugins` describes them)"):
            formatter.write_dl([(group, ", ".join(names)) for group, names in list_names().items()])
