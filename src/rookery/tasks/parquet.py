"""Rows of tasks in Parquet files, as datasets on the hub have them.

Needs pyarrow (the extra `parquet`), which is imported when the first such file is read.

Promises:
- several files of one split are read as one, in the order of their names; of several splits one has to be named;
- what a row has no value for is not there: a column that other rows fill says nothing about this one;
- a file is read a piece at a time, and not at all where a piece is too large to be held.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rookery.core import UsageError
from rookery.core.errors import describe

SUFFIX: Final = ".parquet"
AT_ONCE: Final = 256
"""Rows that are held at a time."""
MAX_GROUP: Final = 4 << 30
"""Bytes of a group of rows, unpacked."""
_NUMBERS = re.compile(r"[-_.]?[0-9]+(?:-of-[0-9]+)?$")


def shards(folder: Path) -> tuple[Path, ...]:
    """The files of the one split that a folder has, in it or in its `data`. `UsageError` where there are more."""
    for place in (folder, folder / "data"):
        found = sorted(path for path in place.glob(f"*{SUFFIX}") if path.is_file())
        splits = sorted({_NUMBERS.sub("", path.stem) for path in found})
        if len(splits) > 1:
            names = ", ".join(repr(name)[:40] for name in splits[:5])
            raise UsageError(
                f"{folder} holds rows of several kinds ({names}): name the files that are meant, "
                f"such as {place.relative_to(folder) / splits[0]}*{SUFFIX}"
            )
        if found:
            return tuple(found)
    return ()


def rows(paths: Sequence[Path]) -> Iterator[tuple[object, int, str]]:
    """Each row, its number, and no problem: what cannot be read raises `UsageError`."""
    number = 0
    for path in paths:
        for row in _rows(path):
            number += 1
            yield row, number, ""


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            f"{path}: rows in Parquet need pyarrow: pip install 'rookery-rl[parquet]', or write tasks as .jsonl"
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            about = file.metadata
            for number in range(about.num_row_groups):
                if about.row_group(number).total_byte_size > MAX_GROUP:
                    raise UsageError(
                        f"{path}: a group of its rows is larger than {MAX_GROUP >> 30} GB: write smaller ones"
                    )
            for batch in file.iter_batches(batch_size=AT_ONCE):
                kinds = {field.name: field.type for field in batch.schema}
                for row in batch.to_pylist():
                    yield _struct(row, kinds, pa)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no Parquet file that can be read: {describe(error)[:300]}") from None


def _struct(value: dict[str, Any], kinds: dict[str, Any], pa: Any) -> dict[str, Any]:
    found = {name: _plain(value.get(name), kind, pa) for name, kind in kinds.items()}
    return {name: one for name, one in found.items() if one is not None}


def _plain(value: Any, kind: Any, pa: Any) -> Any:
    """As JSON would have it."""
    types = pa.types
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if types.is_map(kind):
        return {str(key): _plain(one, kind.item_type, pa) for key, one in value}
    if types.is_struct(kind):
        return _struct(value, {field.name: field.type for field in kind}, pa)
    if isinstance(value, list):
        return [_plain(one, kind.value_type, pa) for one in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:  # as rows write a file
            return {"base64": base64.b64encode(value).decode()}
    return str(value)  # times, decimals
