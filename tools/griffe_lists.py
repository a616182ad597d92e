"""Griffe extension for `make docs`: put a blank line before each list in a docstring, as Markdown requires."""

import re
from typing import Any

from griffe import Extension, Object

_LIST_AFTER_TEXT = re.compile(r"(?m)^(?!\s*(?:[-*]|\d+\.) )(\S.*)\n(?=(?:[-*]|\d+\.) )")


class BlankLineBeforeLists(Extension):
    """Separate lists from the paragraph before them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _LIST_AFTER_TEXT.sub(r"\1\n\n", obj.docstring.value)
