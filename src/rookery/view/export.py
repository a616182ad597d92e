"""Write a selection of a run as one HTML file that needs no server and no network.

The file contains the page and the API responses that it needs. A Content-Security-Policy with the hash of the
page's script prevents any other script, such as one in a transcript, from running.
"""

import base64
import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from rookery.core import Failed, Rollout, RookeryError, UsageError, label
from rookery.view.catalogue import describe_run
from rookery.view.data import RunData, encode
from rookery.view.server import STATIC

MAX_BYTES: Final = 256 << 20
"""Maximum size of the data in the file."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts of a run are exported with their transcripts. The table always lists all rollouts."""

    rollouts: tuple[str, ...] = ()
    """IDs of rollouts; empty selects by the other fields."""
    failed: bool = False
    label: str | None = None
    task: str | None = None
    count: int = 100
    """Maximum number of rollouts."""

    def matches(self, record: Rollout) -> bool:
        """Return whether a rollout is selected."""
        if self.rollouts:
            return record.id in self.rollouts
        return (
            (not self.failed or isinstance(record.outcome, Failed))
            and (self.label is None or label(record.outcome) == self.label)
            and (self.task is None or record.task == self.task)
        )


def export_html(data: RunData, target: Path, selection: Selection) -> int:
    """Write the selected rollouts of a run to an HTML file; return how many there are."""
    chosen = _choose(data, selection)
    name = data.run.name
    answers: dict[str, Any] = {"/api/runs": {"runs": [describe_run(name, data.run, data.journal)]}}
    size = 0

    def add(path: str, value: Any, **query: str | int) -> None:
        nonlocal size
        encoded = encode(value)
        size += len(encoded)
        if size > MAX_BYTES:
            raise UsageError(f"the selection is larger than {MAX_BYTES >> 20} MiB: choose fewer rollouts with -n")
        answers[f"/api/{path}?{urlencode({'run': name, **query})}"] = msgspec.Raw(encoded)

    add("summary", data.summary())
    add("series", data.series())
    add("rollouts", base64.b64encode(data.rollouts()).decode(), start=0, generation=0)
    for group in dict.fromkeys(record.group for record in chosen):
        add("group", data.group(group), group=group)
    for record in chosen:
        add("rollout", data.rollout(record.id), id=record.id)
        try:
            add("tokens", data.tokens(record.id), id=record.id, segment=0, start=0)
        except RookeryError:
            continue  # the rollout has no tokens
    _write(target, build_html({"run": name, "answers": answers}))
    return len(chosen)


def _choose(data: RunData, selection: Selection) -> list[Rollout]:
    found: list[Rollout] = []
    for record in data.reader.iter_rollouts():
        if selection.matches(record):
            found.append(record)
            if len(found) >= selection.count:
                break
    missing = set(selection.rollouts) - {record.id for record in found}
    if missing or not found:
        what = f"rollout {', '.join(sorted(missing))}" if missing else "such rollouts"
        raise UsageError(f"{data.run.name} has no {what:.200}: `rookery show {data.run.name}` lists them")
    return found


def build_html(data: dict[str, Any]) -> bytes:
    """Return the page with its script, its style and the data in one file."""
    script, style = (STATIC / "app.js").read_bytes(), (STATIC / "app.css").read_bytes()
    if b"</script" in script.lower() or b"</style" in style.lower():
        raise AssertionError("the built page cannot be embedded in a file")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # In JSON, `<` occurs in strings only, where the escape means the same; so nothing can end the script element.
    embedded = encode(data).replace(b"<", b"\\u003c")
    return b"".join(
        [
            b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            b'<meta http-equiv="Content-Security-Policy" content="' + policy.encode() + b'">',
            b'<meta name="referrer" content="no-referrer">',
            b'<meta name="viewport" content="width=device-width, initial-scale=1"><title>Rookery</title>',
            b"<style>" + style + b"</style></head><body>",
            b'<div id="app"></div><script type="application/json" id="data">' + embedded + b"</script>",
            b'<script type="module">' + script + b"</script></body></html>\n",
        ]
    )


def _hash(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


def _write(target: Path, content: bytes) -> None:
    """Write the file completely or not at all."""
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {target}: {error.strerror}") from error
