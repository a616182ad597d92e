"""The catalogue of user-facing messages is up to date, and every message follows the style rules."""

import re

import pytest

from tests.messages.collector import CATALOGUE, COMMAND, Message, collect, format_catalogue

FORBIDDEN = re.compile(
    r"\b(box|boxes|door|doors|seat|seats|valve|strands?|births?|newborn|untold|walls|of which|where there is one"
    r"|is none|are none|is no name|is no place|goes? on|gone on|gives no answer)\b",
    re.IGNORECASE,
)
NAMES = (
    *("Rookery", "Docker", "Podman", "Parquet", "Linux", "Harbor", "Python", "Node", "Llama", "Git"),
    *("JSON", "TOML", "MCP", "PID", "HTTP", "URL", "IPv6", "GPU", "NVIDIA", "RLM", "SWE"),
)
"""Proper names and acronyms, which keep their capitals at the start of a message."""
SENTENCES = {"sentence", "cause", "advice"}
"""Kinds that are printed beside others of their kind, and therefore written as full sentences."""
MESSAGES = sorted(set(collect()))


def find_problems(message: Message) -> list[str]:
    """Return the rules of the style guide that a message breaks."""
    text, kind = message.text, message.kind
    problems = [f"contains {match[0]!r}" for match in FORBIDDEN.finditer(re.sub(r"\{[^}]*\}", "…", text))]
    if not re.search(r"[A-Za-z]", text):
        problems.append("is empty")
    if re.search(r"  |\s$|^\s|\s[,.;:](\s|$)", text):
        problems.append("has a misplaced space")
    starts_upper = bool(re.match(r"[A-Z][a-z]*\b", text)) and not text.startswith(NAMES)
    single = not re.search(r"[.?!] [A-Z`{]", text)
    if kind in SENTENCES:
        lower = text[:1].islower() and kind != "sentence"
        if lower or (text[:1].isupper() and not text.endswith((".", "]", "…", "}"))):
            problems.append("is not a full sentence")
    elif kind == "help":
        if text[:1].islower() and not re.match(r"[\w.]+: ", text):
            problems.append("does not start with a capital letter")
        if not text.endswith((".", "]", "…", "}")) and "rookery " not in text:  # it may end with examples
            problems.append("does not end with a period")
    elif kind in ("error", "output", "event"):
        if starts_upper and single and not re.match(r"[A-Z_]{2,}\b", text):
            problems.append("starts with a capital letter")
        if single and text.endswith(".") and not text.endswith(("..", "…")):
            problems.append("ends with a period")
    return problems


@pytest.mark.long
def test_catalogue_is_up_to_date() -> None:
    current = CATALOGUE.read_text(encoding="utf-8") if CATALOGUE.exists() else ""
    assert current == format_catalogue(), f"messages have changed: run `{COMMAND}` and review the difference"


def test_every_kind_of_message_is_collected() -> None:
    kinds = {message.kind for message in MESSAGES}
    assert kinds == {"error", "sentence", "output", "event", "help", "doctor", "fix", "cause", "advice"}


@pytest.mark.parametrize("file", sorted({message.file for message in MESSAGES}))
def test_messages_follow_the_style_rules(file: str) -> None:
    problems = {
        message.text: found for message in MESSAGES if message.file == file if (found := find_problems(message))
    }
    assert problems == {}
