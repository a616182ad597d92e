"""What a grader's script left as its verdict. Pure but for reading it out of the box.

Promises:
- `reward.json` counts before `reward.txt`, and both before the exit code;
- the file is plain, not a link, and bounded; what stands in it is a finite number in the declared range, or named
  finite numbers;
- nothing, an empty file, what cannot be read as a reward, what is not finite and what is out of range are five
  different faults.

Of named parts, `reward` is the reward; where no part has that name, it is their mean.
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

PLACE: Final = f"{LOGS}/verifier"
MOST: Final = 64 << 10
MOST_PARTS: Final = 256
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?")
_WORDS: Final = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)

Source: TypeAlias = Literal["reward.json", "reward.txt", "exit"]


def fault(kind: str, what: str) -> NoReturn:
    raise ScoringError(f"the task's grader {what}", cause=f"scoring.{kind}")


async def found(box: Sandbox, *, timeout: float) -> tuple[Source, bytes] | None:
    """The first file that is there; `ScoringError` where it is none to be believed."""
    for name in ("reward.json", "reward.txt"):
        try:
            data = await box.read(f"{PLACE}/{name}", limit=MOST, timeout=timeout)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except TimeoutError as error:
            raise SandboxError(f"{name} could not be read in time", cause="scoring.timeout") from error
        except OSError as error:
            if error.errno == errno.EFBIG:
                fault("unparsable", f"wrote a {name} of more than {MOST} bytes")
            fault("unparsable", f"left a {name} that is no plain file ({describe(error)})")
        return name, data
    return None


def score_of(source: Source, data: bytes, low: float, high: float) -> Score:
    """The score that a file holds, or `ScoringError`."""
    if not data.strip():
        fault("empty", f"wrote an empty {source}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        fault("unparsable", f"wrote a {source} that is no text")
    value, parts = _from_json(text) if source == "reward.json" else (_from_text(text.strip()), {})
    for name, part in parts.items():
        if not isfinite(part):
            fault("infinite", f"wrote {part!r} for {name!r:.100}, which is not finite")
    if not isfinite(value):
        fault("infinite", f"wrote the reward {value!r}, which is not finite")
    if not low <= value <= high:
        fault("range", f"wrote the reward {value!r}, which is outside of {low:g} to {high:g}")
    return Score(value, parts)


def _from_text(text: str) -> float:
    if not _NUMBER.fullmatch(text) and not _WORDS.fullmatch(text):
        fault("unparsable", f"wrote {text!r:.200} into reward.txt, which is not a number")
    return float(text)


def _from_json(text: str) -> tuple[float, dict[str, float]]:
    try:
        # NaN and Infinity are no JSON, but many writers write them: they are told apart from what is no number.
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        fault("unparsable", f"wrote a reward.json that is no JSON ({describe(error)})"[:300])
    if not isinstance(value, dict):
        return _real(value, "the reward"), {}
    if not value or len(value) > MOST_PARTS:
        fault("unparsable", f"wrote a reward.json with {len(value)} parts; it must have 1 to {MOST_PARTS}")
    parts = {name: _real(part, f"the part {name!r:.100}") for name, part in value.items()}
    reward = parts["reward"] if "reward" in parts else sum(parts.values()) / len(parts)
    return reward, parts


def _real(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        fault("unparsable", f"wrote {str(value)[:100]!r} as {what}, which is not a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
