"""No test outside this directory asserts the wording of a message, so that messages can be reworded freely.

A test asserts the type and the cause of an error, an effect, or a datum that the message must mention: the name of
an option, field, file or command, a number, a path, a value of the user.
"""

import ast
import errno
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.messages.collector import collect

TESTS = Path(__file__).parents[1]
LENGTH = 3
"""A phrase is this many consecutive words in lower case."""
PHRASE = re.compile(r"(?<![\w`'\"/.:<-])[A-Za-z][a-z]*(?: [a-z]+)+(?![\w`'\"/(=-])")
COMMANDS = ("rookery", "make", "pip", "docker")
"""A phrase that starts with one of these is a command line."""


def split_phrases(text: str) -> Iterator[tuple[str, ...]]:
    """Yield all sequences of `LENGTH` consecutive words of a text or regular expression, in lower case."""
    for found in PHRASE.finditer(text.replace("\\", "")):
        words = found[0].lower().split()
        if words[0] not in COMMANDS:
            yield from (tuple(words[at : at + LENGTH]) for at in range(len(words) - LENGTH + 1))


@cache
def phrases_of_messages() -> frozenset[tuple[str, ...]]:
    """Return the phrases of all messages in the catalogue."""
    return frozenset(
        phrase for message in collect() for phrase in split_phrases(re.sub(r"\{[^}]*\}", "{}", message.text))
    )


def find_expectations(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string literals that a test compares a message with.

    They are the literals in the condition of an `assert`, in `match=…`, in the arguments of `assert_refused`, and
    in the columns `EXPECTED` of a table of cases.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from list_literals(node.test)
        elif isinstance(node, ast.For | ast.comprehension):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            yield from list_columns([getattr(target, "id", "") for target in targets], node.iter)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name == "assert_refused":
                yield from (literal for argument in node.args for literal in list_literals(argument))
            elif name == "parametrize":
                names = [part.strip() for text in list_literals(node.args[0]) for part in text.value.split(",")]
                yield from list_columns(names, node.args[1])
            yield from (
                literal for item in node.keywords if item.arg == "match" for literal in list_literals(item)
            )


EXPECTED = {"named", "mentioned", "words", "word", "detail", "reason", "why", "expected"}
"""Names of parameters and loop variables that hold what a message must contain."""


def list_columns(names: list[str], table: ast.expr) -> Iterator[ast.Constant]:
    """Yield the string literals in the columns `EXPECTED` of a list of cases."""
    for row in getattr(table, "elts", []):
        cells = row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row]
        for name, cell in zip(names, cells, strict=False):
            if name in EXPECTED:
                yield from list_literals(cell)


def list_literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string literals of an expression, also the parts of f-strings."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def find_wording(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each phrase of a message that a test asserts.

    A phrase is data if the file itself supplies it in another literal, for example as the error of a test double,
    or if it is part of an error of the operating system.
    """
    tree = ast.parse(source)
    expectations = {id(literal): literal for literal in find_expectations(tree)}
    asserted = [
        (literal.lineno, " ".join(phrase))
        for literal in expectations.values()
        for phrase in set(split_phrases(literal.value)) & phrases_of_messages()
    ]
    if not asserted:
        return
    texts = [literal.value for literal in list_literals(tree) if id(literal) not in expectations]
    supplied = "\n".join([*texts, *map(os.strerror, errno.errorcode)]).lower()
    yield from ((line, words) for line, words in asserted if words not in supplied)


@pytest.mark.timeout(600)  # it reads every test and every message
def test_no_test_asserts_the_wording_of_a_message() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {words!r}"
        for path in sorted(TESTS.rglob("*.py"))
        if TESTS / "messages" not in path.parents
        for line, words in find_wording(path.read_text(encoding="utf-8"))
    ]
    assert not found, (
        "these tests assert words of a message, which may be reworded; assert the type or cause of the error, or "
        "a name or number that the message must mention:\n" + "\n".join(found)
    )


def test_wording_is_found_where_tests_assert_it() -> None:
    wording, datum = "is not a whole number", "--concurrency"
    for source in (
        "assert {!r} in done.err",
        "with pytest.raises(UsageError, match={!r}): pass",
        "done.assert_refused({!r})",
        "@pytest.mark.parametrize(('args', 'named'), [(1, {!r})])\ndef test(): pass",
        "for args, named in ((1, {!r}),): pass",
    ):
        assert [line for line, _ in find_wording(source.format(wording))], source
        assert not list(find_wording(source.format(datum))), source
    assert not list(find_wording(f"server.error = {wording!r}\nassert {wording!r} in done.err"))
