"""Programs that a grader runs inside sandboxes: self-contained, standard library only, Python 3.8 and newer.

Guarantees:
- only plain data passes between tests and submission, and nothing that comes in is unpickled or evaluated;
- `text` returns a program as one source text that needs no other file where it runs;
- `words` returns the command that runs it. An interpreter of our own version gets the compiled code, which saves a
  third of the start-up time.
"""

import base64
import importlib.util
import marshal
import zlib
from functools import cache
from pathlib import Path
from typing import Final

_FUTURE: Final = "from __future__ import annotations\n"
_BOOT: Final = (
    "import sys, binascii, marshal, zlib, _frozen_importlib_external as f\n"
    "exec(marshal.loads(zlib.decompress(binascii.a2b_base64(sys.argv[2]))) "
    "if f.MAGIC_NUMBER.hex() == sys.argv[1] else sys.argv[3])"
)


@cache
def text(name: str) -> str:
    """A program of this folder (`grader`, `submission`), with what it shares in front."""
    names = ("codec", "far", "pytests", "probe", name) if name == "grader" else ("codec", name)
    parts = [(Path(__file__).parent / f"{part}.py").read_text(encoding="utf-8") for part in names]
    lines = "".join(parts).replace(_FUTURE, "").splitlines(keepends=True)
    return _FUTURE + "".join(line for line in lines if not line.startswith("from rookery."))


@cache
def words(name: str) -> tuple[str, ...]:
    """The command that runs it, in whichever Python 3."""
    source = text(name)
    code = marshal.dumps(compile(source, f"<{name}>", "exec", dont_inherit=True, optimize=0))
    packed = base64.b64encode(zlib.compress(code)).decode()
    return ("python3", "-c", _BOOT, importlib.util.MAGIC_NUMBER.hex(), packed, source)
