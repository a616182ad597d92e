"""Read rows that describe tasks from Parquet files, as used by datasets on the Hugging Face Hub.

Requires pyarrow (the optional dependency `rookery-rl[parquet]`), which is imported when the first file is read.

Guarantees:
- The files of one split, such as `train-00000-of-00002.parquet`, are read in the order of their names. If a
  directory contains several splits, the user must choose one.
- A null value is treated as an absent field.

Files are read in batches. A file with a row group of more than `MAX_GROUP_BYTES` is refused.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rookery.core import UsageError
from rookery.core.errors import describe

SUFFIX: Final = ".parquet"
BATCH_ROWS: Final = 256
"""Number of rows that are decoded at a time."""
MAX_GROUP_BYTES: Final = 4 << 30
"""Maximum uncompressed size of a row group in bytes."""
_NUMBERS = re.compile(r"[-_.]?[0-9]+(?:-of-[0-9]+)?$")


def find_shards(folder: Path) -> tuple[Path, ...]:
    """Return the Parquet files in a directory, or else in its subdirectory `data`, sorted by name.

    Raise `UsageError` if they belong to several splits, such as `train` and `test`.
    """
    for directory in (folder, folder / "data"):
        shards = sorted(path for path in directory.glob(f"*{SUFFIX}") if path.is_file())
        splits = sorted({_NUMBERS.sub("", path.stem) for path in shards})
        if len(splits) > 1:
            names = ", ".join(repr(name)[:40] for name in splits[:5])
            raise UsageError(
                f"{folder} contains several splits ({names}): name the files, such as "
                f"{directory.relative_to(folder) / splits[0]}*{SUFFIX}"
            )
        if shards:
            return tuple(shards)
    return ()


def read_rows(paths: Sequence[Path]) -> Iterator[tuple[object, int, str]]:
    """Yield each row of the files, its number from 1, and an empty string.

    The string stands for a problem with the row, as in readers of other formats. Raise `UsageError` if a file
    cannot be read.
    """
    number = 0
    for path in paths:
        for row in _read_file(path):
            number += 1
            yield row, number, ""


def _read_file(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            f"{path}: reading Parquet requires pyarrow: pip install 'rookery-rl[parquet]', or write "
            "tasks as .jsonl"
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            about = file.metadata
            for number in range(about.num_row_groups):
                if about.row_group(number).total_byte_size > MAX_GROUP_BYTES:
                    raise UsageError(
                        f"{path}: a row group is larger than {MAX_GROUP_BYTES >> 30} GB: write smaller row groups"
                    )
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                kinds = {field.name: field.type for field in batch.schema}
                for row in batch.to_pylist():
                    yield _convert_struct(row, kinds, pa)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"cannot read the Parquet file {path}: {describe(error)[:300]}") from None


def _convert_struct(value: dict[str, Any], kinds: dict[str, Any], pa: Any) -> dict[str, Any]:
    values = {name: _convert_value(value.get(name), kind, pa) for name, kind in kinds.items()}
    return {name: one for name, one in values.items() if one is not None}


def _convert_value(value: Any, kind: Any, pa: Any) -> Any:
    """Convert a value of the Arrow type `kind` to JSON-compatible data."""
    types = pa.types
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if types.is_map(kind):
        return {str(key): _convert_value(one, kind.item_type, pa) for key, one in value}
    if types.is_struct(kind):
        return _convert_struct(value, {field.name: field.type for field in kind}, pa)
    if isinstance(value, list):
        return [_convert_value(one, kind.value_type, pa) for one in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:  # like the content of a file in a row
            return {"base64": base64.b64encode(value).decode()}
    return str(value)  # times and decimals
