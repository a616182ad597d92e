"""Recorded requests of real agents, stored in `recorded/CLIENT.json`.

- Loading returns what was saved, exchange by exchange.
- A part that several requests share is stored once, under a name, so that the files stay readable.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

RECORDINGS: Final = Path(__file__).parent / "recorded"
SHARED: Final = "$shared"
QUESTION: Final = "6 * 7?"
ANSWER: Final = "echo $((6 * 7)) > answer.txt"
ABOUT: Final = "Writes the answer"
DONE: Final = "it is done"
PART: Final = "a part of the task"
PART_DONE: Final = "the part is 42"
SUMMARY: Final = "The answer 42 was written."
MORE: Final = "And now?"
TITLE: Final = "Six times seven"
THOUGHTS: Final = tuple(f"Thought {number} of the script." for number in range(20))
OWN: Final = (QUESTION, ANSWER, ABOUT, DONE, PART, PART_DONE, SUMMARY, MORE, TITLE, *THOUGHTS)
"""Texts of the recording tests: the only prose that a recording may contain."""
_MIN_SHARED: Final = 120
"""A repeated part of at least this many characters is stored once."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded request and, if it called a model, the model's reply."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None
    status: int = 200
    answer: dict[str, Any] | None = None


def list_clients() -> list[str]:
    return sorted(path.stem for path in RECORDINGS.glob("*.json"))


def load_conversations(client: str) -> dict[str, list[Exchange]]:
    """Load the conversations of a client, by the name of the test that recorded them."""
    path = RECORDINGS / f"{client}.json"
    if not path.exists():
        return {}
    loaded = unpack(json.loads(path.read_text(encoding="utf-8")))
    return {name: msgspec.convert(part, list[Exchange]) for name, part in loaded.items()}


def save_conversation(client: str, name: str, exchanges: list[Exchange]) -> None:
    """Save a conversation in the file of a client, replacing the one of the same name."""
    known = {**load_conversations(client), name: exchanges}
    packed = pack(msgspec.to_builtins({part: known[part] for part in sorted(known)}))
    RECORDINGS.mkdir(exist_ok=True)
    text = json.dumps(packed, indent=1, ensure_ascii=False) + "\n"
    (RECORDINGS / f"{client}.json").write_text(text, encoding="utf-8")


def pack(value: Any) -> dict[str, Any]:
    """Replace repeated parts of a value by references to a table of shared parts."""
    seen: Counter[str] = Counter()
    _count(value, seen)
    names: dict[str, str] = {}
    shared: dict[str, Any] = {}

    def replace_shared(part: Any, *, inside: bool) -> Any:
        text = _text(part) if inside else ""
        if seen[text] > 1 and len(text) >= _MIN_SHARED:
            if text not in names:
                names[text] = f"{_kind(part)}-{len(names)}"
                shared[names[text]] = replace_shared(part, inside=False)
            return {SHARED: names[text]}
        if isinstance(part, dict):
            return {name: replace_shared(inner, inside=True) for name, inner in part.items()}
        if isinstance(part, list):
            return [replace_shared(inner, inside=True) for inner in part]
        return part

    conversations = replace_shared(value, inside=False)
    return {"shared": shared, "conversations": conversations}


def unpack(value: dict[str, Any]) -> Any:
    shared = value["shared"]

    def resolve(part: Any) -> Any:
        if isinstance(part, dict):
            if part.keys() == {SHARED}:
                return resolve(shared[part[SHARED]])
            return {name: resolve(inner) for name, inner in part.items()}
        return [resolve(inner) for inner in part] if isinstance(part, list) else part

    return resolve(value["conversations"])


def _count(part: Any, seen: Counter[str]) -> None:
    """Count how often each large part occurs, without descending into parts already counted."""
    text = _text(part)
    if len(text) < _MIN_SHARED:
        return
    seen[text] += 1
    if seen[text] > 1:
        return
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _count(inner, seen)


def _text(part: Any) -> str:
    return json.dumps(part, ensure_ascii=False) if isinstance(part, dict | list | str) else ""


def _kind(part: Any) -> str:
    if isinstance(part, dict):
        return str(part.get("name") or part.get("type") or "object")
    return "list" if isinstance(part, list) else "text"
