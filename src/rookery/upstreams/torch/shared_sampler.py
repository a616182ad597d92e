"""Samplers that are shared by all users of the same address in this process.

An upstream, the check before a run and a trainer may all open `hf:PATH`. The model is loaded when the first of
them needs it, once, and freed when the last one has closed its handle. This module imports torch only to load a
model.
"""

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.upstreams.torch.loading import ModelLoadError, check_path, import_packages, load_model

if TYPE_CHECKING:
    from rookery.upstreams.torch.sampler import Sampler

PREFIX: Final = "hf"
_OPTIONS: Final = ("device", "dtype", "slots", "context")


class TorchAddress(NamedTuple):
    """The parts of an address `hf:PATH?device=cuda:0&dtype=bfloat16&slots=64&context=4096`."""

    path: Path
    device: str = ""
    """A device of torch; empty for the first GPU, or the CPU without one."""
    dtype: str = ""
    """A floating-point type of torch; empty for bfloat16 on a GPU and float32 on a CPU."""
    slots: int | None = None
    """How many sequences are sampled at a time; None for as many as the memory allows."""
    context: int | None = None
    """The maximum length of a sequence; None for that of the model, up to 4096."""


def parse_address(address: str) -> TorchAddress:
    """Parse an address. Raises `UsageError` if it is not valid. Opens no file."""
    prefix, _, rest = address.partition(":")
    text, _, query = rest.partition("?")
    if prefix not in (PREFIX, "torch") or not text:
        raise UsageError(f"{address!r} is not the address of a torch model: use hf:PATH")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if strange := sorted(options.keys() - set(_OPTIONS)):
        raise UsageError(f"the address of a torch model has no option {strange[0]!r}; use {', '.join(_OPTIONS)}")
    numbers: dict[str, Any] = {}
    for name in ("slots", "context"):
        if name in options:
            if not options[name].isdecimal() or int(options[name]) < 1:
                raise UsageError(f"{name} must be a number of at least 1, not {options[name]!r}: {address}")
            numbers[name] = int(options[name])
    path = Path(text).expanduser().absolute()
    return TorchAddress(path, options.get("device", ""), options.get("dtype", ""), **numbers)


class _Entry:
    """One sampler of this process, and how many handles use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sampler: Sampler | None = None
        self.users = 0


_entries: dict[tuple[Path, str, str], _Entry] = {}
_entries_lock = threading.Lock()


class SharedSampler:
    """A handle to the sampler of an address, which all handles of this process with the same path, device and type
    share."""

    def __init__(self, address: str) -> None:
        """Check the address and the model's config. Loads no weights. Raises `UsageError` if they are invalid."""
        self.address = parse_address(address)
        check_path(self.address.path)
        self._key = (self.address.path, self.address.device, self.address.dtype)
        self._entry: _Entry | None = None

    def open(self) -> "Sampler":
        """Return the sampler. Loads the model if no other handle has done so, which may take a minute.

        Raises `ModelLoadError` if the model cannot be loaded. Do not call this on an event loop.
        """
        with _entries_lock:
            if self._entry is None:
                self._entry = _entries.setdefault(self._key, _Entry())
                self._entry.users += 1
            entry = self._entry
        with entry.lock:
            if entry.sampler is None:
                entry.sampler = self._load()
            return entry.sampler

    def _load(self) -> "Sampler":
        torch, _ = import_packages(gguf=self.address.path.is_file())
        from rookery.upstreams.torch.sampler import Sampler

        device = self.address.device or ("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_model(self.address.path, device=device, dtype=self.address.dtype)
        try:
            return Sampler(loaded, slots=self.address.slots, context=self.address.context)
        except RuntimeError as error:  # torch has no other type for memory that a CPU cannot allocate
            raise ModelLoadError(
                f"the KV cache of the model at {self.address.path} does not fit into the memory of {device}; set "
                f"fewer slots or a shorter context, as in hf:PATH?slots=8&context=2048: {describe(error)}",
                "memory",
            ) from error

    async def close(self) -> None:
        """Close this handle. The last one ends the sampler's thread and frees the model. Closing twice is fine."""
        with _entries_lock:
            entry, self._entry = self._entry, None
            if entry is None:
                return
            entry.users -= 1
            if entry.users:
                return
            del _entries[self._key]
        sampler = await asyncio.to_thread(_take, entry)
        if sampler is not None:
            await sampler.close()


def _take(entry: _Entry) -> "Sampler | None":
    with entry.lock:  # waits for a load in another thread
        sampler, entry.sampler = entry.sampler, None
        return sampler
