"""Requests of real agents, as files: `recorded/CLIENT.json`.

Promises:
- what was kept is read back as it was, exchange by exchange;
- what several requests have in common stands in a file once, under a name, and the file stays readable.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

RECORDED: Final = Path(__file__).parent / "recorded"
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
"""What the tests of agents ask and let models say: all the prose that a recording may hold."""
_WORTH: Final = 120
"""Characters from which on a part that comes again is worth a name."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request and, where it asked a model, what that said."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None
    status: int = 200
    answer: dict[str, Any] | None = None


def clients() -> list[str]:
    return sorted(path.stem for path in RECORDED.glob("*.json"))


def conversations(client: str) -> dict[str, list[Exchange]]:
    """What was recorded of a client, by the test it was recorded in."""
    path = RECORDED / f"{client}.json"
    if not path.exists():
        return {}
    found = unpacked(json.loads(path.read_text(encoding="utf-8")))
    return {name: msgspec.convert(one, list[Exchange]) for name, one in found.items()}


def keep(client: str, name: str, exchanges: list[Exchange]) -> None:
    """Puts a conversation into a client's file, in the place of the one of that name."""
    known = {**conversations(client), name: exchanges}
    packed_up = packed(msgspec.to_builtins({one: known[one] for one in sorted(known)}))
    RECORDED.mkdir(exist_ok=True)
    text = json.dumps(packed_up, indent=1, ensure_ascii=False) + "\n"
    (RECORDED / f"{client}.json").write_text(text, encoding="utf-8")


def packed(value: Any) -> dict[str, Any]:
    """`value` with what comes more than once named and told once."""
    seen: Counter[str] = Counter()
    _count(value, seen)
    names: dict[str, str] = {}
    shared: dict[str, Any] = {}

    def spelled(one: Any, *, inside: bool) -> Any:
        text = _text(one) if inside else ""
        if seen[text] > 1 and len(text) >= _WORTH:
            if text not in names:
                names[text] = f"{_kind(one)}-{len(names)}"
                shared[names[text]] = spelled(one, inside=False)
            return {SHARED: names[text]}
        if isinstance(one, dict):
            return {name: spelled(inner, inside=True) for name, inner in one.items()}
        if isinstance(one, list):
            return [spelled(inner, inside=True) for inner in one]
        return one

    found = spelled(value, inside=False)
    return {"shared": shared, "conversations": found}


def unpacked(value: dict[str, Any]) -> Any:
    shared = value["shared"]

    def told(one: Any) -> Any:
        if isinstance(one, dict):
            if one.keys() == {SHARED}:
                return told(shared[one[SHARED]])
            return {name: told(inner) for name, inner in one.items()}
        return [told(inner) for inner in one] if isinstance(one, list) else one

    return told(value["conversations"])


def _count(one: Any, seen: Counter[str]) -> None:
    """How often each part that is worth it occurs, outside of those that are counted already."""
    text = _text(one)
    if len(text) < _WORTH:
        return
    seen[text] += 1
    if seen[text] > 1:
        return
    for inner in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
        _count(inner, seen)


def _text(one: Any) -> str:
    return json.dumps(one, ensure_ascii=False) if isinstance(one, dict | list | str) else ""


def _kind(one: Any) -> str:
    if isinstance(one, dict):
        return str(one.get("name") or one.get("type") or "object")
    return "list" if isinstance(one, list) else "text"
