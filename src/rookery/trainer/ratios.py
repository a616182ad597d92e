"""Importance ratios of trained tokens. The trainer writes them, and the viewer shows them.

The ratio of a token is its probability under the trained policy, before the step, divided by its probability when
it was sampled. The directory `importance` of a training run has a directory for each journal, and in it one file
per step, with one float32 for each trained token of each segment. `index.jsonl` says which groups a step trained.

- A file is complete or absent.
- A damaged or missing file only means that the viewer shows no ratios.
"""

import os
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.core import parse_rollout_id
from rookery.trainer.errors import write_error
from rookery.training import Batch, PackedRow, PrefixTreeRow

FOLDER: Final = "importance"
INDEX: Final = "index.jsonl"
SegmentRatios: TypeAlias = dict[int, bytes]
"""Ratios of the trained tokens (float32) by number of the segment."""


class _StepEntry(msgspec.Struct, frozen=True):
    """A line of the index: a step, and the groups whose tokens trained in it."""

    step: int
    groups: list[int]


_decode_ratios = msgspec.msgpack.Decoder(dict[str, SegmentRatios]).decode


def split_by_segment(
    batch: Batch, rows: list[tuple[PackedRow | PrefixTreeRow, npt.NDArray[np.float32]]]
) -> dict[str, SegmentRatios]:
    """Return the ratios by rollout ID and segment. Each row comes with the ratios of its trained tokens.

    The trained tokens of a row are those of its segments, one after the other.
    """
    found: dict[str, SegmentRatios] = {}
    for row, ratios in rows:
        counts = [int(batch.segments.trained[segment]) for segment in row.segments.tolist()]
        parts = np.split(ratios, np.cumsum(counts)[:-1])
        for segment, values in zip(row.segments.tolist(), parts, strict=True):
            if len(values):
                rollout = batch.rollouts.id[int(batch.segments.rollout[segment])]
                number = int(batch.segments.number[segment])
                found.setdefault(rollout, {})[number] = values.astype("<f4").tobytes()
    return found


def write_ratios(folder: Path, journal: str, step: int, ratios: dict[str, SegmentRatios]) -> None:
    """Write the ratios of a step. Raise `TrainingError` if that fails."""
    target = folder / FOLDER / journal / f"step-{step:08}.msgpack"
    part = target.with_name(f".{target.name}-{os.getpid()}")
    groups = {found[0] for rollout in ratios if (found := parse_rollout_id(rollout)) is not None}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.msgpack.encode(ratios))
        part.replace(target)
        with (target.parent / INDEX).open("ab") as file:
            file.write(msgspec.json.encode(_StepEntry(step, sorted(groups))) + b"\n")
    except OSError as error:
        raise write_error(folder / FOLDER, error) from error


def read_ratios(folder: Path, journal: str, rollout: str) -> SegmentRatios:
    """Return the ratios of a rollout by segment; empty if the trainer wrote none or they cannot be read."""
    found = parse_rollout_id(rollout)
    home = folder / FOLDER / journal
    try:
        for line in reversed((home / INDEX).read_bytes().splitlines()):
            entry = msgspec.json.decode(line, type=_StepEntry)
            if found is not None and found[0] in entry.groups:
                content = (home / f"step-{entry.step:08}.msgpack").read_bytes()
                return _decode_ratios(content).get(rollout, {})
    except (OSError, msgspec.MsgspecError):
        pass
    return {}
