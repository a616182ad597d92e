"""Export a run as JSONL, CSV or Parquet, or its conversations in other formats, for other programs.

- There is one row per rollout record, ordered by group and member. All rows have the same columns.
- All formats contain the same data. In CSV and Parquet, columns whose structure varies are JSON text.
- Rollout IDs are written with the prefix `r` (`r0.10`), so that a program that guesses types does not read them as
  numbers.
- At most one page of records is in memory at a time, whatever the size of the run.
- The exported file appears under its name only when it is complete. An interrupted export leaves no partial file.
- A rollout that cannot be loaded or written is exported with the outcome `Failed` and the traceback. The export
  continues with the others.
"""

import csv
import io
import os
import secrets
import struct
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import IO, Any, Literal, TextIO, TypeAlias, TypeVar, cast, get_args

import msgspec

from rookery.core import (
    SCORED,
    Extra,
    Outcome,
    Rollout,
    Segment,
    Task,
    UsageError,
    failed_outcome,
    label,
    mark_failed,
)
from rookery.core.errors import describe
from rookery.core.prices import Price, PriceTable, find_models
from rookery.journal.atif_content import ConversationImages
from rookery.journal.conversations import make_openai_rows, make_sharegpt_rows, make_trajectory
from rookery.journal.loading import MERGE, load_turns, merge_turns
from rookery.journal.reader import RunReader
from rookery.trajectories import build_transcript

T = TypeVar("T")
Progress = Callable[[int], None]
Conversations = Literal["atif", "openai", "sharegpt"]
Prices: TypeAlias = Mapping[str, Price] | None
ROW_GROUP = 256
ROW_GROUP_BYTES = 32 << 20
MAX_TASK_VALUE = 64 << 10
"""Maximum size in bytes of one value in `Task.data`, as JSON. A larger value is exported as its size only."""

_json = msgspec.json.Encoder()


class Exported(msgspec.Struct, frozen=True):
    """Result of an export."""

    rollouts: int
    """Number of exported rollouts."""
    damaged: int
    """Number of rollouts that have a problem in `damage`: they could not be loaded or converted, or lack token
    IDs."""


def rows(
    reader: RunReader, *, tokens: bool = False, prices: Mapping[str, Price] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one JSON-compatible dictionary per rollout record, as `row` returns it, by group and member."""
    run = run_facts(reader)
    table = get_price_table(run["settings"], prices)
    group, task = -1, _task_facts(None)
    for record in reader.iter_rollouts():
        if record.group != group:
            group, task = record.group, _task_facts(reader.task_of(record.group))
        yield {**_row(reader, record, task, run, tokens=tokens), "cost": _get_cost(table, record)}


def get_price_table(settings: dict[str, Any], prices: Mapping[str, Price] | None = None) -> PriceTable | None:
    """Return the prices of a run's models: `prices` by model name, else those in its settings, else None."""
    found = prices or msgspec.convert(settings.get("prices") or {}, dict[str, Price])
    return PriceTable(found, find_models(settings)) if found else None


def _get_cost(table: PriceTable | None, record: Rollout) -> float | None:
    return table.compute_cost(record.usage) if table is not None else None


def row(reader: RunReader, record: Rollout, *, tokens: bool = False) -> dict[str, Any]:
    """Return a rollout record as JSON-compatible data, with its messages and, with `tokens`, its segments.

    A valid rollout whose tokens cannot be loaded gets the outcome `Failed`. The field `damage` says why the data
    of a rollout, valid or not, is incomplete; it is None if nothing is missing.
    """
    run = run_facts(reader)
    found = _row(reader, record, _task_facts(reader.task_of(record.group)), run, tokens=tokens)
    return {**found, "cost": _get_cost(get_price_table(run["settings"]), record)}


def run_facts(reader: RunReader) -> dict[str, Any]:
    """Return the run's name, status, environment, model and settings.

    Every exported row contains them, so that rows of several runs can be mixed.
    """
    meta = reader.meta()
    return {
        "name": reader.folder.resolve().name,
        "status": reader.status,
        "environment": meta.get("env", ""),
        "model": meta.get("model", ""),
        "created": float(meta.get("created", 0.0)),
        "settings": reader.config(),
    }


def _task_facts(task: Task | None) -> dict[str, Any]:
    if task is None:
        return {"answer": None, "task_data": {}}
    data = {name: _limit_size(msgspec.to_builtins(value, str_keys=True)) for name, value in task.data.items()}
    return {"answer": data.get("answer"), "task_data": data}


def _limit_size(value: Any) -> Any:
    size = len(_json.encode(value))
    return value if size <= MAX_TASK_VALUE else {"left_out_bytes": size}


def _row(
    reader: RunReader, record: Rollout, task: dict[str, Any], run: dict[str, Any], *, tokens: bool
) -> dict[str, Any]:
    messages: list[Any] = []
    parts: list[dict[str, Any]] = []
    damage: str | None = None
    try:
        turns = load_turns(record, reader.tokens)
        messages = [msgspec.to_builtins(message) for message in build_transcript(turns)]
        merged = merge_turns(record, turns) if record.valid else []
        parts = [_dump_segment(one) for one in merged] if tokens else []
        if tokens and record.valid and record.usage.without_tokens:
            damage = f"{record.usage.without_tokens} of {record.usage.turns} turns have no token IDs"
    except Exception as error:  # noqa: BLE001  (it fails this rollout alone)
        messages, parts, damage = [], [], describe(error)
        record = mark_failed(record, error, cause=MERGE)
    row: dict[str, Any] = {
        "id": f"r{record.id}",
        "group": record.group,
        "member": record.member,
        "task": record.task,
        "environment": record.environment,
        **task,
        "seed": record.seed,
        "label": label(record.outcome),
        "outcome": _dump_outcome(record.outcome),
        "reward": record.reward,
        "rewards": _drop_non_finite(record.rewards),
        "metrics": _drop_non_finite(record.metrics),
        "info": record.info,
        "messages": messages,
        "usage": msgspec.structs.asdict(record.usage),
        "timing": msgspec.structs.asdict(record.timing),
        "attempts": [
            {**msgspec.structs.asdict(attempt), "outcome": _dump_outcome(attempt.outcome)}
            for attempt in record.attempts
        ],
        "damage": damage,
        "run": run,
    }
    if tokens:
        row["segments"] = parts
    return row


def _convert_or_fail(one: dict[str, Any], convert: Callable[[dict[str, Any]], T]) -> tuple[T, bool]:
    """Return the row as converted by `convert`, and whether the row has a problem in `damage`.

    If `convert` raises, convert the row again without its content and with the outcome `Failed`.
    """
    try:
        return convert(one), one["damage"] is not None
    except Exception as error:  # noqa: BLE001  (a row that cannot be written stops no other)
        outcome = failed_outcome(error, "load", cause=MERGE)
        empty: dict[str, Any] = {
            "answer": None,
            "task_data": {},
            "reward": None,
            "rewards": {},
            "metrics": {},
            "info": {},
            "messages": [],
            "attempts": [],
            "damage": describe(error),
            "label": label(outcome),
            "outcome": _dump_outcome(outcome),
            **({"segments": []} if "segments" in one else {}),
        }
        return convert({**one, **empty}), True


def _drop_non_finite(numbers: dict[str, float]) -> dict[str, float | None]:
    # JSON cannot represent infinity and NaN.
    return {name: value if isfinite(value) else None for name, value in numbers.items()}


def _dump_outcome(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.__struct_config__.tag, **msgspec.structs.asdict(outcome)}


def _dump_segment(segment: Segment) -> dict[str, Any]:
    n = len(segment)
    return {
        "tokens": list(struct.unpack(f"<{n}i", segment.tokens)),
        "mask": list(segment.mask),
        "logprobs": list(struct.unpack(f"<{n}f", segment.logprobs)),
        "versions": [{"start": span.start, "end": span.end, "version": span.version} for span in segment.versions],
        "turns": list(segment.turns),
        "extras": {name: _dump_extra(extra) for name, extra in segment.extras.items()},
    }


def _dump_extra(extra: Extra) -> dict[str, Any]:
    return {"dtype": extra.dtype, "width": extra.width, "data": b64encode(extra.data).decode()}


def export_jsonl(
    reader: RunReader,
    out: TextIO | Path,
    *,
    tokens: bool = False,
    progress: Progress | None = None,
    prices: Prices = None,
) -> Exported:
    """Write one JSON object per rollout record and line.

    `tokens` adds the segments. `progress` is called with the number of rows written so far.
    """
    if tokens:
        _check_tokens(reader)
    return _write_text(reader, out, "", lambda row: _json.encode(row).decode() + "\n", tokens, progress, prices)


def _check_tokens(reader: RunReader) -> None:
    """Raise `UsageError` if no turn of any valid rollout has token IDs, because there are no segments to write."""
    _check_recorded(reader)
    turns = missing = 0
    for record in reader.iter_rollouts():
        if record.valid:
            turns += record.usage.turns
            missing += record.usage.without_tokens
    if turns and missing == turns:
        raise UsageError(
            f"{reader.folder.name} has no token IDs: none of its {turns:,} turns has them. Run again "
            "with a server that returns them or with --record tokens, or export without --tokens"
        )


def _check_recorded(reader: RunReader) -> None:
    """Raise `UsageError` if the run did not record model calls."""
    if reader.config().get("record") == "off":
        raise UsageError(
            f"{reader.folder.name} has no tokens and no conversations: its model calls were not recorded "
            "(--record off)"
        )


def _write_text(
    reader: RunReader,
    out: IO[str] | Path,
    header: str,
    convert: Callable[[dict[str, Any]], str],
    tokens: bool,
    progress: Progress | None,
    prices: Prices,
) -> Exported:
    """Write a header and the lines to which `convert` converts the rows."""
    if isinstance(out, Path):
        with _atomic_file(out) as part, part.open("w", encoding="utf-8", newline="") as file:
            return _write_text(reader, file, header, convert, tokens, progress, prices)
    out.write(header)
    done = damaged = 0
    for one in rows(reader, tokens=tokens, prices=prices):
        line, bad = _convert_or_fail(one, convert)
        out.write(line)
        done += 1
        damaged += bad
        if progress is not None:
            progress(done)
    return Exported(done, damaged)


def export_conversations(
    reader: RunReader,
    out: TextIO | Path,
    kind: Conversations,
    *,
    tokens: bool = False,
    progress: Progress | None = None,
    images: ConversationImages | None = None,
) -> Exported:
    """Write conversations as JSONL, in the format `atif`, `openai` or `sharegpt`.

    `atif` has one line per rollout, and with `tokens` token IDs and log probabilities. The other formats have one
    line per conversation of a completed or truncated rollout. `progress` is called with the number of rollouts so
    far. The result counts rollouts that were written, and those whose turns cannot be read, which are left out.
    Images of `atif` are stored with `images`; if `out` is a path, in a directory `NAME-images` beside it.
    """
    _check_recorded(reader)
    if tokens and kind != "atif":
        raise UsageError(f"the format {kind} has no token IDs: use atif or jsonl, or export without --tokens")
    if isinstance(out, Path):
        with _atomic_file(out) as part, part.open("w", encoding="utf-8", newline="") as file:
            images = ConversationImages(out.with_name(f"{out.stem}-images"))
            return export_conversations(reader, file, kind, tokens=tokens, progress=progress, images=images)
    make_rows = make_openai_rows if kind == "openai" else make_sharegpt_rows
    run = run_facts(reader)
    done = damaged = 0
    for record in reader.iter_rollouts():
        if kind != "atif" and not isinstance(record.outcome, SCORED):
            continue
        try:
            turns = load_turns(record, reader.tokens)
            if kind == "atif":
                found = [make_trajectory(record, turns, run=run, tokens=tokens, images=images)]
            else:
                found = list(make_rows(record, turns))
            lines = [_json.encode(one).decode() + "\n" for one in found]
        except Exception:  # noqa: BLE001  (a rollout that cannot be written stops no other)
            damaged += 1
            continue
        out.writelines(lines)
        done += 1
        if progress is not None:
            progress(done)
    return Exported(done, damaged)


def export_csv(
    reader: RunReader,
    out: TextIO | Path,
    *,
    tokens: bool = False,
    progress: Progress | None = None,
    prices: Prices = None,
) -> Exported:
    """Write a header line and one CSV record per rollout. Values that are neither text nor numbers are JSON text.

    `tokens` adds the segments. `progress` is called with the number of rows written so far.
    """
    if tokens:
        _check_recorded(reader)
    names = [*COLUMNS, *(("segments",) if tokens else ())]

    def convert(row: dict[str, Any]) -> str:
        return _csv_line([_cell(row[name]) for name in names])

    return _write_text(reader, out, _csv_line(names), convert, tokens, progress, prices)


def _csv_line(cells: Iterable[str | float]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) else _json.encode(value).decode()


def export_parquet(
    reader: RunReader, path: Path, *, tokens: bool = False, progress: Progress | None = None, prices: Prices = None
) -> Exported:
    """Write one Parquet row per rollout record.

    Columns whose structure varies (outcome, info, messages, …) are JSON text. `tokens` adds the segments.
    `progress` is called with the number of rows read so far.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow: install it with `pip install 'rookery-rl[parquet]'`, or export JSONL"
        ) from error
    if tokens:
        _check_tokens(reader)
    schema = _schema(pa, tokens)
    done = damaged = size = 0
    page: list[dict[str, Any]] = []
    with _atomic_file(path) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:

        def write() -> int:
            """Write the collected rows; return how many of them could not be loaded or converted."""
            if not page:
                return 0
            try:
                table = pa.Table.from_pylist([_columns(one) for one in page], schema=schema)
                bad = sum(one["damage"] is not None for one in page)
            except Exception:  # noqa: BLE001  (one of the rows is the reason: convert each alone)
                alone = [
                    _convert_or_fail(one, lambda row: pa.Table.from_pylist([_columns(row)], schema=schema))
                    for one in page
                ]
                table = pa.concat_tables([found for found, _ in alone])
                bad = sum(failed_alone for _, failed_alone in alone)
            writer.write_table(table)
            page.clear()
            return bad

        for one in rows(reader, tokens=tokens, prices=prices):
            page.append(one)
            size += sum(12 * len(segment["tokens"]) for segment in one.get("segments", ()))
            size += sum(len(str(message)) for message in one["messages"])
            done += 1
            if len(page) >= ROW_GROUP or size >= ROW_GROUP_BYTES:
                damaged += write()
                size = 0
            if progress is not None:
                progress(done)
        damaged += write()
    return Exported(done, damaged)


_BY_ROLE = ("others", "other_prompts")
_AS_JSON = ("answer", "task_data", "outcome", "info", "messages", "attempts", "run")
COLUMNS = (
    *("id", "group", "member", "task", "environment", "answer", "task_data", "seed", "label", "outcome", "reward"),
    *("rewards", "metrics", "info", "messages", "usage", "timing", "attempts", "damage", "run", "cost"),
)


def _columns(one: dict[str, Any]) -> dict[str, Any]:
    columns = {**one, **{name: _json.encode(one[name]).decode() for name in _AS_JSON}}
    columns["rewards"], columns["metrics"] = list(one["rewards"].items()), list(one["metrics"].items())
    usage = one["usage"]
    columns["usage"] = {**usage, **{name: list(usage[name].items()) for name in _BY_ROLE}}
    if "segments" in one:
        columns["segments"] = [
            {**part, "extras": _json.encode(part["extras"]).decode()} for part in one["segments"]
        ]
    return columns


def _schema(pa: Any, tokens: bool) -> Any:
    text, real, count = pa.string(), pa.float64(), pa.int64()
    stages = ("queue", "setup", "run", "score", "teardown", "model", "sandbox", "paused")
    counts = ("turns", "prompt_tokens", "sampled_tokens", "tool_calls", "drifted", "without_tokens")
    fields = {
        "id": text,
        "group": count,
        "member": count,
        "task": text,
        "environment": text,
        "answer": text,
        "task_data": text,
        "seed": count,
        "label": text,
        "outcome": text,
        "reward": real,
        "rewards": pa.map_(text, real),
        "metrics": pa.map_(text, real),
        "info": text,
        "messages": text,
        "usage": pa.struct(
            [*((name, count) for name in counts), *((name, pa.map_(text, count)) for name in _BY_ROLE)]
        ),
        "timing": pa.struct([(name, real) for name in stages]),
        "attempts": text,
        "damage": text,
        "run": text,
        "cost": real,
    }
    if tokens:
        span = pa.struct([("start", count), ("end", count), ("version", count)])
        fields["segments"] = pa.list_(
            pa.struct(
                [
                    ("tokens", pa.list_(pa.int32())),
                    ("mask", pa.list_(pa.int8())),
                    ("logprobs", pa.list_(pa.float32())),
                    ("versions", pa.list_(span)),
                    ("turns", pa.list_(count)),
                    ("extras", text),
                ]
            )
        )
    return pa.schema(list(fields.items()))


@contextmanager
def _atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the directory of `path`.

    The file written there is renamed to `path` if the block succeeds, and removed otherwise.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        reason: str = error.strerror or str(error)
        raise UsageError(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


Kind = Literal["jsonl", "csv", "parquet"] | Conversations
_KINDS: dict[str, Kind] = {
    "": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}


def format_from_path(path: Path) -> Kind:
    """Return the export format for the extension of a file name; no extension means JSONL.

    Raise `UsageError` if the extension is unknown.
    """
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(
            f"{path.name} has no extension of an export format: use .jsonl, .csv or .parquet, or pass --format"
        )
    return kind


def export(
    reader: RunReader,
    path: Path,
    *,
    kind: Kind | None = None,
    tokens: bool = False,
    progress: Progress | None = None,
    prices: Prices = None,
) -> Exported:
    """Export a run to a file. Without `kind`, the format follows from the file extension.

    `tokens` adds the segments. `progress` is called with the number of rows processed so far. `prices` by model
    name override those of the run; the column `cost` is computed from them.
    """
    kind = kind or format_from_path(path)
    if kind in get_args(Conversations):
        return export_conversations(reader, path, cast("Conversations", kind), tokens=tokens, progress=progress)
    write = {"jsonl": export_jsonl, "csv": export_csv, "parquet": export_parquet}[kind]
    return write(reader, path, tokens=tokens, progress=progress, prices=prices)
