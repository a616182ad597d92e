"""Unpack one image layer. A self-contained package that runs as a separate, confined process.

It imports only small modules of the standard library, so that a child process starts in a few milliseconds, and
uses relative imports, so that it works without the rest of `rookery`. `UNPACK_COMMAND` starts it.
"""

import sys

UNPACK_COMMAND = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from unpacker.layer import main; main()",
    __path__[0].rpartition("/")[0],
)
"""Command line of the unpacking process; the arguments of `layer.main` follow it."""
