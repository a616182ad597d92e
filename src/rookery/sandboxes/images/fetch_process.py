"""Entry point of the child process that fetches one image. Its parent can continue meanwhile, and can kill it.

The only argument is a `FetchRequest` as JSON. Standard output carries JSON objects, one per line: progress, and
at the end either `image` or `error` with its cause. After that the process flushes the new layers to disk.
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
from rookery.sandboxes.docker.client import BlockingEngineClient
from rookery.sandboxes.images import engine_loader
from rookery.sandboxes.images.engine_images import EngineImages
from rookery.sandboxes.images.installer import ImageInstaller
from rookery.sandboxes.images.progress import ImageProgress
from rookery.sandboxes.images.references import ImageReference
from rookery.sandboxes.images.store import ImageStore

_PR_SET_PDEATHSIG = 1


class FetchRequest(msgspec.Struct, kw_only=True):
    directory: str
    """The directory of the image store."""
    reference: ImageReference
    parent_pid: int
    engine_socket: str = ""
    """Path of the socket of the container engine to load the image into; if empty, it goes into the store."""


def _send(message: dict[str, Any]) -> None:
    data = msgspec.json.encode(message) + b"\n"
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    request = msgspec.json.decode(sys.argv[1], type=FetchRequest)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request.parent_pid:
        return
    store = ImageStore(Path(request.directory))
    name = request.reference.text

    def on_progress(progress: ImageProgress) -> None:
        _send({"progress": progress})

    layers: tuple[str, ...] = ()
    try:
        if request.engine_socket:
            images = EngineImages(BlockingEngineClient(request.engine_socket))
            image = engine_loader.load_image(request.reference, images, store, on_progress)
        else:
            record = ImageInstaller(store, request.reference, on_progress=on_progress).install()
            image, layers = record.id, record.layers
    except RookeryError as error:
        _send({"error": str(error), "cause": error.code})
    except OSError as error:
        _send({"error": f"the image {name} could not be fetched: {error}", "cause": "sandbox.image"})
    except Exception as error:
        _send({"error": f"the image {name} could not be fetched: {describe(error)}", "cause": "bug.rookery"})
        raise
    else:
        _send({"image": image})
        with contextlib.suppress(OSError):
            store.sync(layers)


if __name__ == "__main__":
    main()
