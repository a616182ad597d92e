"""Suggestions for words that were misspelt, for error messages."""

from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known word that is most similar to `word`.

    Return an empty string if no known word is similar.
    """
    from difflib import get_close_matches  # a few milliseconds, which only an error should pay

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), list(by_lower), 1, 0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
