"""`rookery images`: what sandboxes are made from, kept once for all runs of this machine.

Promises:
- what is fetched is shown while it comes: a bar on a terminal, a line now and then elsewhere, on stderr;
- what a live process uses is never removed; what is removed is said, with its size;
- an image that cannot be had is one sentence, with its name and what to do, and exit code 2 (3 where it was the
  network, the registry or the disk);
- Ctrl-C leaves nothing half-made.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.errors import Exit
from rookery.cli.options import Size

if TYPE_CHECKING:
    from rookery.sandboxes.images.progress import OnProgress, Progress
    from rookery.sandboxes.images.records import Record
    from rookery.sandboxes.images.references import Reference

_HELP = """Images that sandboxes are made from, kept once for all runs of this machine.

\b
  rookery images pull python:3.12                          from an engine here, or a registry
  rookery images import ./system.tar.gz mine:1             a system's files, under a name
  rookery exec --image mine:1 -- cat /etc/os-release       use it
  rookery images prune --to 20G                            make room, the longest unused first

They lie in ROOKERY_IMAGES (~/.cache/rookery/images) and hold up to ROOKERY_IMAGES_BUDGET (64G).
Keys for registries are those that `docker login` stores.
"""
_LINE_SECONDS = 5.0


@click.group(help=_HELP, short_help="List, fetch, import and prune images for sandboxes.")
def images() -> None:
    pass


@images.command(name="list", short_help="What is there, how large, and who uses it.")
@click.option("--json", is_flag=True, help="One JSON object a line.")
def list_(json: bool) -> int:
    """What is there, how large it is, when it was used last, and by whom it is used now."""
    import msgspec

    from rookery.cli.text import age, amount, bold, dim, shown_path, table
    from rookery.sandboxes.images.content import Store, usual_budget

    store = Store().open()
    found = store.listed()
    if json:
        for one in found:
            click.echo(msgspec.json.encode(one))
        return 0
    if not found:
        click.echo(
            f"no images in {shown_path(store.folder)} yet: `rookery images pull NAME` fetches one", err=True
        )
        return 0
    rows = [[dim(word) for word in ("image", "id", "layers", "size", "alone", "used", "in use by")]]
    for one in found:
        by = ", ".join(str(pid) for pid in one.used_by[:5]) + ("…" if len(one.used_by) > 5 else "")
        rows.append(
            [
                bold(_named(one.names)),
                one.id[:12],
                str(one.layers),
                amount(one.bytes),
                amount(one.own_bytes),
                age(one.used),
                by,
            ]
        )
    click.echo("\n".join(table(rows, right=frozenset({2, 3, 4}))))
    click.echo(dim(f"{amount(store.held())} of {amount(usual_budget())} in {shown_path(store.folder)}"), err=True)
    return 0


@images.command(short_help="Fetch images by name.")
@click.argument("names", metavar="NAME…", nargs=-1, required=True)
@click.option("--platform", metavar="P", default="", help="Such as linux/arm64.  [default: this machine's]")
@click.option("--json", is_flag=True, help="One JSON object for each image, as it is there.")
def pull(names: tuple[str, ...], platform: str, json: bool) -> int:
    """Fetches images, from the container engine of this machine where it has them, else from their registry.

    NAME is python:3.12, host/team/app@sha256:…, engine:NAME, registry:NAME, oci:DIR, docker-archive:FILE or
    dockerfile:DIR. A name that is there already is asked for again: it may mean another image by now.
    """
    from rookery.core import UsageError
    from rookery.sandboxes.images.references import parse

    asked = [parse(name) for name in names]
    for one in asked:
        if one.plain:
            raise UsageError(
                f"{one.text} is a system's files, which sandboxes use as they are; to keep them under a name: "
                f"`rookery images import {one.text} NAME`"
            )
    return max(_made(one, json=json, platform=_platform(platform)) for one in asked)


@images.command(name="import", short_help="Keep files as an image, under a name.")
@click.argument("source", metavar="SOURCE")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", is_flag=True, help="One JSON object on stdout.")
def import_(source: str, name: str | None, json: bool) -> int:
    """Keeps an image under NAME.

    SOURCE is a folder or an archive that holds a system (plain or compressed), an OCI layout, an archive of
    `docker save`, or dockerfile:DIR. An archive that names its image needs no NAME.
    """
    from rookery.core import UsageError
    from rookery.sandboxes.images.references import parse

    reference = parse(source)
    if reference.registry:
        raise UsageError(
            f"there is no folder or archive {source}; `rookery images pull {source}` fetches an image"
        )
    called = ""
    if name is not None:
        wanted = parse(name)
        if wanted.kind != "name" or wanted.digest:
            raise UsageError(f"{name!r} cannot be the name of an image: names are like mine:1")
        called = wanted.name
    elif reference.kind != "docker-archive":
        raise UsageError(f"what is {source} to be called? `rookery images import {source} NAME`")
    return _made(reference, json=json, name=called)


@images.command(short_help="Remove what nobody needs, or make room.")
@click.option(
    "--to", "to", metavar="SIZE", type=Size(0), help="Until the rest is no larger: the longest unused first."
)
@click.option("--all", "everything", is_flag=True, help="Every image that is not in use.")
@click.option("--unused", metavar="DAYS", type=float, help="Those not used for so many days.")
@click.option("--json", is_flag=True, help="One JSON object on stdout.")
def prune(to: int | None, everything: bool, unused: float | None, json: bool) -> int:
    """Removes what interrupted work left, images without a name and layers of no image.

    With --to, --unused or --all also images with one. What is in use stays.
    """
    import msgspec

    from rookery.cli.text import amount, plural
    from rookery.core import UsageError
    from rookery.sandboxes.images.content import Store, usual_budget

    if unused is not None and not 0 <= unused < 1e6:
        raise UsageError(f"--unused: {unused} is no number of days")
    store = Store().open()
    budget = 0 if everything else usual_budget() if to is None else to
    done = store.prune(budget=budget, older=time.time() - unused * 86400 if unused is not None else 0.0)
    if json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(done), "held": store.held()}))
        return 0
    for name in done.images:
        click.echo(f"removed {_named((name,))}")
    parts = [plural(len(done.images), "image"), plural(done.layers, "layer"), plural(done.leftovers, "leftover")]
    click.echo(f"freed {amount(done.bytes)}: {', '.join(parts)}; {amount(store.held())} are kept")
    if done.kept_in_use:
        click.echo(f"{plural(done.kept_in_use, 'image')} in use stayed", err=True)
    return 0


def _platform(text: str) -> str:
    from rookery.core import UsageError

    parts = text.split("/")
    if text and (len(parts) not in (2, 3) or not all(part.isalnum() for part in parts)):
        raise UsageError(f"--platform: {text!r} is not like linux/amd64")
    return text


def _made(reference: "Reference", *, json: bool, platform: str = "", name: str = "") -> int:
    """Makes one image, and says so."""
    import msgspec

    from rookery.cli.errors import say_error
    from rookery.cli.text import amount
    from rookery.core import RookeryError
    from rookery.sandboxes.images.content import Store
    from rookery.sandboxes.images.making import Making

    store, began = Store(), time.monotonic()
    try:
        with _progress() as tell:
            own = reference.kind == "docker-archive" and not name
            record = Making(
                store, reference, platform=platform, again=True, name=name, own_names=own, on_progress=tell
            ).run()
            store.sync(record.layers)
    except RookeryError as error:
        say_error(str(error))
        return Exit.FAILED if error.fault == "infra" else Exit.USAGE
    size = sum(info.bytes for layer in record.layers if (info := store.info(layer)))
    shown = _named((name or reference.name or reference.text,))
    if json:
        said = {"image": shown, "id": record.id, "layers": len(record.layers), "bytes": size}
        click.echo(msgspec.json.encode({**said, "platform": record.platform, "names": _names(store, record)}))
    else:
        click.echo(f"{shown}  {record.id[:12]}  {amount(size)}  {time.monotonic() - began:.1f}s")
    return Exit.OK


def _names(store: Any, record: "Record") -> list[str]:
    return next((list(one.names) for one in store.listed() if one.id == record.id), [])


@contextlib.contextmanager
def _progress() -> "Iterator[OnProgress]":
    """What is told is shown: as a bar that is gone afterwards, or as a line now and then."""
    if not sys.stderr.isatty():
        yield lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(progress: "Progress") -> None:
            from rookery.cli.text import line

            layers = f", {progress.layers_done} of {progress.layers} layers" if progress.layers else ""
            words = f"{line(progress.image, 50)}: {progress.step}{layers}"
            bar.update(task, description=words, completed=progress.done, total=progress.total or None)

        yield tell


def lines() -> "OnProgress":
    """A line on stderr when something changes, or now and then."""
    from rookery.cli.text import amount

    last: tuple[str, float] = ("", 0.0)

    def tell(progress: "Progress") -> None:
        nonlocal last
        if progress.step in ("waiting", "ready", "failed"):  # the error says why
            return
        if progress.step != last[0] or time.monotonic() - last[1] > _LINE_SECONDS:
            last = (progress.step, time.monotonic())
            much = f" {amount(progress.done)} of {amount(progress.total)}" if progress.total else ""
            layers = f", {progress.layers_done} of {progress.layers} layers" if progress.layers else ""
            click.echo(f"{progress.image}: {progress.step}{much}{layers}", err=True)

    return tell


def _named(names: tuple[str, ...]) -> str:
    """The shortest that people would write; a file's without what tells its versions apart."""
    from rookery.cli.text import line
    from rookery.sandboxes.images.references import shown

    short = sorted((shown(name) for name in names), key=lambda name: (name.startswith(_FILES), len(name)))
    if not short:
        return "(no name)"
    first = short[0].rsplit(":", 5)[0] if short[0].startswith(_FILES) and short[0].count(":") > 4 else short[0]
    return line(first, 60)


_FILES = ("oci:", "oci-archive:", "docker-archive:", "tar:", "folder:", "dockerfile:")
