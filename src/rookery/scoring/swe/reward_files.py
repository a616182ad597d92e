"""Read and validate the reward that a test script wrote.

Guarantees:
- `reward.json` takes precedence over `reward.txt`.
- The file must be a regular file of at most `MAX_BYTES`, not a symbolic link. It must contain a finite number,
  or, in `reward.json`, an object of named finite numbers. The number named `reward` is the reward; without it,
  the mean of all numbers is. The reward must be in the declared range.
- A missing file, an empty file, an unparsable reward, a reward that is not finite, and a reward out of range have
  five different causes.
"""

import errno
import json
import re
from math import isfinite
from typing import Final, Literal, NoReturn, TypeAlias

from rookery.core import SandboxError, ScoringError
from rookery.core.errors import describe
from rookery.sandboxes import Sandbox
from rookery.scoring.rewards import Score
from rookery.tasks.swe import LOGS

DIRECTORY: Final = f"{LOGS}/verifier"
MAX_BYTES: Final = 64 << 10
MAX_PARTS: Final = 256
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?")
_NON_FINITE: Final = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")

RewardSource: TypeAlias = Literal["reward.json", "reward.txt", "exit"]


def raise_fault(kind: str, what: str) -> NoReturn:
    """Raise `ScoringError` with the cause `scoring.KIND`; `what` completes the sentence "the test script …"."""
    raise ScoringError(f"the task's test script {what}", cause=f"scoring.{kind}")


async def read_reward_file(sandbox: Sandbox, *, timeout: float) -> tuple[RewardSource, bytes] | None:
    """Return the name and content of the reward file that takes precedence, or None if there is no reward file.

    Raise `ScoringError` if the file is too large or not a regular file.
    """
    for name in ("reward.json", "reward.txt"):
        try:
            data = await sandbox.read(f"{DIRECTORY}/{name}", limit=MAX_BYTES, timeout=timeout)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except TimeoutError as error:
            raise SandboxError(
                f"the sandbox did not return {DIRECTORY}/{name} in time", cause="scoring.timeout"
            ) from error
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise_fault("unparsable", f"wrote a {name} of more than {MAX_BYTES} bytes")
            raise_fault("unparsable", f"left a {name} that is not a regular file ({describe(error)})")
        return name, data
    return None


def parse_reward(source: RewardSource, data: bytes, low: float, high: float) -> Score:
    """Return the score that a reward file contains. Raise `ScoringError` if it is not valid.

    The reward must be from `low` to `high`.
    """
    if not data.strip():
        raise_fault("empty", f"wrote an empty {source}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise_fault("unparsable", f"wrote a {source} that is not valid UTF-8")
    value, parts = _parse_json(text) if source == "reward.json" else (_parse_text(text.strip()), {})
    for name, part in parts.items():
        if not isfinite(part):
            raise_fault("infinite", f"wrote {part!r} for {name!r:.100}, which is not finite")
    if not isfinite(value):
        raise_fault("infinite", f"wrote the reward {value!r}, which is not finite")
    if not low <= value <= high:
        raise_fault("range", f"wrote the reward {value!r}, which is outside the range {low:g} to {high:g}")
    return Score(value, parts)


def _parse_text(text: str) -> float:
    if not _NUMBER.fullmatch(text) and not _NON_FINITE.fullmatch(text):
        raise_fault("unparsable", f"wrote {text!r:.200} into reward.txt, which is not a number")
    return float(text)


def _parse_json(text: str) -> tuple[float, dict[str, float]]:
    try:
        # NaN and Infinity are not valid JSON, but common. They get another cause than text that is not a number.
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise_fault("unparsable", f"wrote a reward.json that is not valid JSON ({describe(error)})"[:300])
    if not isinstance(value, dict):
        return _to_float(value, "the reward"), {}
    if not value or len(value) > MAX_PARTS:
        raise_fault("unparsable", f"wrote a reward.json with {len(value)} parts; it must have 1 to {MAX_PARTS}")
    for name in value:
        if _SURROGATE.search(name):
            raise_fault(
                "unparsable", f"wrote a reward.json with the part {name!r:.100}, which is not valid Unicode"
            )
    parts = {name: _to_float(part, f"the part {name!r:.100}") for name, part in value.items()}
    reward = parts["reward"] if "reward" in parts else sum(parts.values()) / len(parts)
    return reward, parts


def _to_float(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise_fault("unparsable", f"wrote {str(value)[:100]!r} as {what}, which is not a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
