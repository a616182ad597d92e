"""Makes one image, as a program of its own: whoever waits for it goes on with other work, and can end it.

It is started with one JSON object as its argument, and says JSON objects, a line each: how far it is, at last
`made`, or `error` with its cause. Then it lets what it made reach the disk.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.sandboxes.images import giving
from rookery.sandboxes.images.content import Store
from rookery.sandboxes.images.engine import Engine
from rookery.sandboxes.images.making import Making
from rookery.sandboxes.images.progress import Progress
from rookery.sandboxes.images.references import Reference


class Asked(msgspec.Struct, kw_only=True):
    folder: str
    reference: Reference
    parent: int
    platform: str = ""
    engine: str = ""
    """The socket of one that is to have it, instead of the store."""


def _say(said: dict[str, Any]) -> None:
    data = msgspec.json.encode(said) + b"\n"
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: what is half-made is nobody's then
    if os.getppid() != asked.parent:
        return
    store = Store(Path(asked.folder))

    def tell(progress: Progress) -> None:
        _say({"progress": progress})

    layers: tuple[str, ...] = ()
    try:
        if asked.engine:
            made = giving.give(asked.reference, Engine(asked.engine), store, tell)
        else:
            record = Making(store, asked.reference, platform=asked.platform, on_progress=tell).run()
            made, layers = record.id, record.layers
    except RookeryError as error:
        _say({"error": str(error), "cause": error.code})
    except OSError as error:
        _say({"error": f"the image {asked.reference.text} could not be made: {error}", "cause": "sandbox.image"})
    except Exception as error:
        _say({"error": f"the image {asked.reference.text}: {describe(error)}", "cause": "bug.rookery"})
        raise
    else:
        _say({"made": made})
        with contextlib.suppress(OSError):
            store.sync(layers)


if __name__ == "__main__":
    main()
