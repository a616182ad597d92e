"""`rookery images`: list, pull, import and prune the sandbox images of this machine.

Downloads show progress on stderr: a bar on a terminal, else a line every few seconds.

Guarantees:
- an image in use is never removed; removed images are printed with their size;
- a failed pull is reported in one sentence with the image and the next step, and with exit code 2 (3 if the
  network, the registry or the disk failed);
- Ctrl-C leaves no incomplete image.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from rookery.cli.errors import Exit
from rookery.cli.options import Size, option

if TYPE_CHECKING:
    from rookery.sandboxes.images.progress import ImageProgress, OnProgress
    from rookery.sandboxes.images.records import ImageRecord
    from rookery.sandboxes.images.references import ImageReference

_HELP = """Manage the images of sandboxes. They are stored once for all runs of this machine.

\b
  rookery images pull python:3.12                          from the container engine or a registry
  rookery images import ./system.tar.gz mine:1             a file system archive, under a name
  rookery exec --image mine:1 -- cat /etc/os-release       use it
  rookery images prune --to 20G                            free space, least recently used first

They are stored in ROOKERY_IMAGES (~/.cache/rookery/images), up to ROOKERY_IMAGES_BUDGET (64G).
Registry credentials are those of `docker login`.
"""
_LINE_SECONDS = 5.0


@click.group(help=_HELP, short_help="List, pull, import and prune sandbox images.")
def images() -> None:
    pass


@images.command(name="list", short_help="List images with size and use.")
@option("--json", is_flag=True, help="Print one JSON object per line.")
def list_(json: bool) -> int:
    """List the images with their size, their last use and the processes that use them."""
    import msgspec

    from rookery.cli.terminal import bold, dim, format_age, format_bytes, format_table, relative_path
    from rookery.sandboxes.images.store import ImageStore, default_budget

    store = ImageStore().open()
    found = store.list_images()
    if json:
        for one in found:
            click.echo(msgspec.json.encode(one))
        return 0
    if not found:
        click.echo(
            f"no images in {relative_path(store.folder)} yet: `rookery images pull NAME` fetches one", err=True
        )
        return 0
    rows = [[dim(word) for word in ("image", "id", "layers", "size", "alone", "used", "in use by")]]
    for one in found:
        by = ", ".join(str(pid) for pid in one.used_by[:5]) + ("…" if len(one.used_by) > 5 else "")
        rows.append(
            [
                bold(_choose_name(one.names)),
                one.id[:12],
                str(one.layers),
                format_bytes(one.bytes),
                format_bytes(one.own_bytes),
                format_age(one.used),
                by,
            ]
        )
    click.echo("\n".join(format_table(rows, right=frozenset({2, 3, 4}))))
    total = store.total_bytes()
    click.echo(
        dim(f"{format_bytes(total)} of {format_bytes(default_budget())} in {relative_path(store.folder)}"),
        err=True,
    )
    return 0


@images.command(short_help="Pull images by name.")
@click.argument("names", metavar="NAME…", nargs=-1, required=True)
@option("--platform", metavar="P", default="", help="For example linux/arm64.  [default: this machine's]")
@option("--json", is_flag=True, help="Print one JSON object per image.")
def pull(names: tuple[str, ...], platform: str, json: bool) -> int:
    """Pull images from the container engine of this machine, or else from their registry.

    NAME is python:3.12, host/team/app@sha256:…, engine:NAME, registry:NAME, oci:DIR, docker-archive:FILE or
    dockerfile:DIR. A stored name is looked up again, because its tag may have moved.
    """
    from rookery.core import UsageError
    from rookery.sandboxes.images.references import parse_reference

    asked = [parse_reference(name) for name in names]
    for one in asked:
        if one.plain:
            raise UsageError(
                f"{one.text} is a directory or archive, which sandboxes use directly; to store it under a name: "
                f"`rookery images import {one.text} NAME`"
            )
    return max(_create_image(one, json=json, platform=_check_platform(platform)) for one in asked)


@images.command(name="import", short_help="Store files as an image.")
@click.argument("source", metavar="SOURCE")
@click.argument("name", metavar="[NAME]", required=False)
@option("--json", is_flag=True, help="Print one JSON object.")
def import_(source: str, name: str | None, json: bool) -> int:
    """Store an image under NAME.

    SOURCE is a directory or archive with a root file system, an OCI layout, an archive of `docker save`, or
    dockerfile:DIR. An archive that names its image needs no NAME.
    """
    from rookery.core import UsageError
    from rookery.sandboxes.images.references import parse_reference

    reference = parse_reference(source)
    if reference.registry:
        raise UsageError(
            f"{source} is neither a directory nor an archive; to pull an image: `rookery images pull {source}`"
        )
    called = ""
    if name is not None:
        wanted = parse_reference(name)
        if wanted.kind != "name" or wanted.digest:
            raise UsageError(f"{name!r} is not an image name: use a name such as mine:1")
        called = wanted.name
    elif reference.kind != "docker-archive":
        raise UsageError(f"{source} has no image name: run `rookery images import {source} NAME`")
    return _create_image(reference, json=json, name=called)


@images.command(short_help="Remove unused images.")
@option("--to", "to", type=Size(0), help="Remove least recently used images until at most SIZE is left.")
@option("--all", "everything", is_flag=True, help="Remove every image that is not in use.")
@option("--unused", metavar="DAYS", type=float, help="Remove images not used for this many days.")
@option("--json", is_flag=True, help="Print one JSON object.")
def prune(to: int | None, everything: bool, unused: float | None, json: bool) -> int:
    """Remove leftovers of interrupted pulls, images without a name and unreferenced layers.

    With --to, --unused or --all, images with a name are removed too. Images in use are kept.
    """
    import msgspec

    from rookery.cli.terminal import format_bytes, plural
    from rookery.core import UsageError
    from rookery.sandboxes.images.store import ImageStore, default_budget

    if unused is not None and not 0 <= unused < 1e6:
        raise UsageError(f"--unused: {unused} is not a number of days")
    store = ImageStore().open()
    budget = 0 if everything else default_budget() if to is None else to
    done = store.prune(budget=budget, older=time.time() - unused * 86400 if unused is not None else 0.0)
    if json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(done), "held": store.total_bytes()}))
        return 0
    for name in done.images:
        click.echo(f"removed {_choose_name((name,))}")
    parts = [plural(len(done.images), "image"), plural(done.layers, "layer"), plural(done.leftovers, "leftover")]
    click.echo(f"freed {format_bytes(done.bytes)}: {', '.join(parts)}; {format_bytes(store.total_bytes())} remain")
    if done.kept_in_use:
        click.echo(f"kept {plural(done.kept_in_use, 'image')} in use", err=True)
    return 0


def _check_platform(text: str) -> str:
    from rookery.core import UsageError

    parts = text.split("/")
    if text and (len(parts) not in (2, 3) or not all(part.isalnum() for part in parts)):
        raise UsageError(f"--platform: {text!r} is not a platform such as linux/amd64")
    return text


def _create_image(reference: "ImageReference", *, json: bool, platform: str = "", name: str = "") -> int:
    """Install one image in the image store, print the result and return the exit code."""
    import msgspec

    from rookery.cli.errors import print_error
    from rookery.cli.terminal import format_bytes
    from rookery.core import RookeryError
    from rookery.sandboxes.images.installer import ImageInstaller
    from rookery.sandboxes.images.store import ImageStore

    store, began = ImageStore(), time.monotonic()
    try:
        with _show_progress() as show:
            own = reference.kind == "docker-archive" and not name
            record = ImageInstaller(
                store,
                reference,
                platform=platform,
                refresh=True,
                name=name,
                source_names=own,
                on_progress=show,
            ).install()
            store.sync(record.layers)
    except RookeryError as error:
        print_error(str(error))
        return Exit.FAILED if error.fault == "infra" else Exit.USAGE
    size = sum(info.bytes for layer in record.layers if (info := store.get_layer(layer)))
    shown = _choose_name((name or reference.name or reference.text,))
    if json:
        result = {"image": shown, "id": record.id, "layers": len(record.layers), "bytes": size}
        click.echo(
            msgspec.json.encode({**result, "platform": record.platform, "names": _find_names(store, record)})
        )
    else:
        click.echo(f"{shown}  {record.id[:12]}  {format_bytes(size)}  {time.monotonic() - began:.1f}s")
    return Exit.OK


def _find_names(store: Any, record: "ImageRecord") -> list[str]:
    return next((list(one.names) for one in store.list_images() if one.id == record.id), [])


@contextlib.contextmanager
def _show_progress() -> "Iterator[OnProgress]":
    """Yield a callback that shows progress on stderr: as a bar on a terminal, else as lines."""
    if not sys.stderr.isatty():
        yield print_progress_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show_progress(progress: "ImageProgress") -> None:
            from rookery.cli.terminal import one_line

            layers = f", {progress.layers_done} of {progress.layers} layers" if progress.layers else ""
            words = f"{one_line(progress.image, 50)}: {progress.step}{layers}"
            bar.update(task, description=words, completed=progress.done, total=progress.total or None)

        yield show_progress


def print_progress_lines() -> "OnProgress":
    """Return a callback that prints a line to stderr for every new step of a download, and every few seconds."""
    from rookery.cli.terminal import format_bytes

    last: tuple[str, float] = ("", 0.0)

    def show_progress(progress: "ImageProgress") -> None:
        nonlocal last
        if progress.step in ("waiting", "ready", "failed"):  # the error message follows
            return
        if progress.step != last[0] or time.monotonic() - last[1] > _LINE_SECONDS:
            last = (progress.step, time.monotonic())
            much = f" {format_bytes(progress.done)} of {format_bytes(progress.total)}" if progress.total else ""
            layers = f", {progress.layers_done} of {progress.layers} layers" if progress.layers else ""
            click.echo(f"{progress.image}: {progress.step}{much}{layers}", err=True)

    return show_progress


def _choose_name(names: tuple[str, ...]) -> str:
    """Return the name of an image to display: the shortest registry name, or else the shortest file name.

    A stored file name ends with the identity of the file (device, inode, size, time), which is cut off.
    """
    from rookery.cli.terminal import one_line
    from rookery.sandboxes.images.references import familiar_name

    short = sorted(
        (familiar_name(name) for name in names), key=lambda name: (name.startswith(_FILE_PREFIXES), len(name))
    )
    if not short:
        return "(no name)"
    first = (
        short[0].rsplit(":", 5)[0] if short[0].startswith(_FILE_PREFIXES) and short[0].count(":") > 4 else short[0]
    )
    return one_line(first, 60)


_FILE_PREFIXES = ("oci:", "oci-archive:", "docker-archive:", "tar:", "folder:", "dockerfile:")
