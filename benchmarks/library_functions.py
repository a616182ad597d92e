"""Functions of Rookery beside the library that does the same, without a network. `benchmarks.libraries` runs this.

The figure is CPU time, the best of some rounds. A library that is not installed has a row without a figure.
"""

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from errno import EPERM
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from benchmarks import Progress, Result
from rookery.environments.tools import tool
from rookery.gateway.metrics import ShardMetrics
from rookery.sandbox_runtime import seccomp, syscalls
from rookery.sandboxes.images.file_locks import try_lock
from rookery.telemetry.catalogue import GATEWAY_COUNTS

TARGET: Final = ">= 1.3x"
"""Own code stays if it is this much better than the library, or if the library cannot do what is needed. Rows of
parts that stay for the second reason have no target."""
MACHINE: Final = os.uname().machine
IMPORTS: Final = (
    ("seccomp, import", "rookery.sandbox_runtime.seccomp", "pyseccomp", None),
    ("tool schemas, import", "msgspec.json", "pydantic", None),
    ("Kubernetes client, import", "rookery.sandboxes.kubernetes.client, aiohttp", "kubernetes.client", TARGET),
)
"""Name of a row, what each side imports in a new interpreter, and the target."""

Call = Callable[[], object]


def load_library(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError):  # without libseccomp.so, pyseccomp raises RuntimeError
        return None


def compare_functions(rounds: int, count: int, progress: Progress) -> list[Result]:
    progress("Prometheus, file locks, tool schemas, seccomp, imports")
    return [
        _compare(
            "Prometheus, count a call",
            _count_call,
            "prometheus_client",
            _library_count_call,
            rounds,
            count,
            TARGET,
        ),
        *_compare_locks(rounds, count // 10),
        *_compare_tools(rounds, count // 10),
        *_compare_filters(rounds, count),
        *(_compare_imports(name, own, library, target, rounds) for name, own, library, target in IMPORTS),
    ]


def _compare(
    name: str,
    own: Callable[[], Call],
    peer: str,
    library: Callable[[ModuleType], Call],
    rounds: int,
    count: int,
    target: str | None = None,
) -> Result:
    """`own` and `library` return the function to measure. `library` is called only if the peer is installed."""
    module = load_library(peer)
    sides = [own()] if module is None else [own(), library(module)]
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for index, call in enumerate(sides):
            best[index] = min(best[index], _time(call, count))
    return Result(
        name=name,
        unit="CPU us",
        ours=best[0],
        peer=peer,
        theirs=None if module is None else best[1],
        target=target,
    )


def _time(call: Call, count: int) -> float:
    """Return the CPU microseconds of one call."""
    begun = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begun) / count * 1e6


# ---- metrics


def _count_call() -> Call:
    """One model call counts a response, a turn, its tokens and its seconds."""
    metrics = ShardMetrics(0)

    def count() -> None:
        metrics.count_response(200)
        metrics.count("turns")
        metrics.count("prompt_tokens", 24)
        metrics.count("sampled_tokens", 256)
        metrics.observe_call(0.2)

    return count


def _library_count_call(library: ModuleType) -> Call:
    registry = library.CollectorRegistry()
    counters = {
        name: library.Counter(
            f"rookery_gateway_{name}",
            text,
            ["shard", "status"] if name == "requests" else ["shard"],
            registry=registry,
        )
        for name, text in [("requests", "HTTP responses."), *((n, c.help) for n, c in GATEWAY_COUNTS.items())]
    }
    seconds = library.Histogram("rookery_gateway_call_seconds", "x", ["shard"], registry=registry).labels("0")
    turns, prompt_tokens, sampled_tokens = (
        counters[name].labels("0") for name in ("turns", "prompt_tokens", "sampled_tokens")
    )

    def count() -> None:
        counters["requests"].labels("0", "200").inc()
        turns.inc()
        prompt_tokens.inc(24)
        sampled_tokens.inc(256)
        seconds.observe(0.2)

    return count


# ---- file locks


def _compare_locks(rounds: int, count: int) -> list[Result]:
    """Take and release a lock.

    Without a target: the own code is kept because filelock cannot turn an exclusive lock into a shared one.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lock"

        def lock_exclusive() -> None:
            held = try_lock(path, exclusive=True)
            assert held is not None
            held.close()

        def lock_shared() -> None:
            held = try_lock(path, exclusive=False)
            assert held is not None
            held.close()

        def exclusive_lock(library: ModuleType) -> Call:
            held = library.FileLock(f"{path}-exclusive")

            def acquire() -> None:
                with held.acquire(timeout=0):
                    pass

            return acquire

        def shared_lock(library: ModuleType) -> Call:
            held = library.ReadWriteLock(f"{path}-shared")

            def acquire() -> None:
                with held.read_lock(timeout=0):
                    pass

            return acquire

        return [
            _compare("file lock, exclusive", lambda: lock_exclusive, "filelock", exclusive_lock, rounds, count),
            _compare("file lock, shared", lambda: lock_shared, "filelock", shared_lock, rounds, count),
        ]


# ---- tool schemas


def _search(query: str, limit: int = 10, exact: bool = False, tags: list[str] | None = None) -> str:
    """Search the documents.

    query: words to search for
    limit: largest number of results
    exact: whether to search for the whole query
    tags: only documents with these tags
    """
    return f"{query} {limit} {exact} {tags}"


ARGUMENTS: Final = '{"query": "the capital of France", "limit": 5, "tags": ["geography"]}'


def _compare_tools(rounds: int, count: int) -> list[Result]:
    def define_model(library: ModuleType) -> Any:
        fields = {
            "query": (str, ...),
            "limit": (int, 10),
            "exact": (bool, False),
            "tags": (list[str] | None, None),
        }
        return library.create_model("search", **fields)

    def build(library: ModuleType) -> Call:
        return lambda: define_model(library).model_json_schema()

    def parse(library: ModuleType) -> Call:
        return partial(define_model(library).model_validate_json, ARGUMENTS)

    # No target: msgspec is a library, too, and does the work on our side.
    return [
        _compare("tool schema, build", lambda: partial(tool, _search), "pydantic", build, rounds, count // 10),
        _compare(
            "tool schema, parse a call",
            lambda: partial(tool(_search).parse, ARGUMENTS),
            "pydantic",
            parse,
            rounds,
            count * 10,
        ),
    ]


# ---- seccomp


def _compare_filters(rounds: int, count: int) -> list[Result]:
    """Build a filter, install it in a child process, and make a call that it allows.

    Without a target: the own code is kept because libseccomp cannot express the filter, not for its speed.
    """
    library = load_library("pyseccomp")
    filters = [seccomp.build_filter(MACHINE)] + ([] if library is None else [_library_filter(library)])
    best = [(float("inf"), float("inf"))] * len(filters)
    for _ in range(rounds):
        for index, program in enumerate(filters):
            measured = _measure_filter(program, count)
            best[index] = tuple(map(min, best[index], measured))  # type: ignore[assignment]
    build = _compare(
        "seccomp, build",
        lambda: partial(seccomp.build_filter, MACHINE),
        "pyseccomp",
        lambda module: partial(_library_filter, module),
        rounds,
        max(1, count // 100),
    )
    return [build] + [
        Result(
            name=f"seccomp, {name}",
            unit="CPU us",
            ours=best[0][column],
            peer="pyseccomp",
            theirs=None if library is None else best[1][column],
        )
        for column, name in enumerate(("install", "filtered call"))
    ]


def _library_filter(library: ModuleType) -> bytes:
    """Build a filter that refuses the same calls, as far as libseccomp knows them and can express the rules.

    A rule compares each argument at most once, so a filter that allows by default cannot refuse "any value but
    these": families of sockets are listed one by one, and protocols are not checked.
    """
    rules = library.SyscallFilter(library.ALLOW)
    rules.set_attr(library.Attr.CTL_OPTIMIZE, 2)
    refuse = library.ERRNO(EPERM)
    by_argument: dict[str, list[Any]] = {
        "clone": [library.Arg(0, library.MASKED_EQ, 1 << bit, 1 << bit) for bit in _bits(seccomp.CLONE_NEW_FLAGS)],
        "ioctl": [library.Arg(1, library.EQ, request) for request in (0x5412, 0x541C, 0x5423)],
        "fcntl": [library.Arg(1, library.EQ, command) for command in (1024, 1026, 1040)],
        "socket": [library.Arg(0, library.EQ, family) for family in range(46) if family not in (1, 2, 10, 16)],
        "personality": [library.Arg(0, library.NE, 0)],
    }
    by_argument["unshare"] = by_argument["clone"]
    by_argument["socketpair"] = by_argument["socket"]
    for name in seccomp.call_numbers(MACHINE):
        number = library.resolve_syscall(library.Arch.NATIVE, name)
        if number < 0:
            continue  # unknown to the installed libseccomp
        for arguments in [[one] for one in by_argument[name]] if name in by_argument else [[]]:
            rules.add_rule(refuse, number, *arguments)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _bits(flags: int) -> list[int]:
    return [bit for bit in range(32) if flags >> bit & 1]


def _measure_filter(program: bytes, count: int) -> tuple[float, float]:
    """Return the CPU microseconds of installing a filter, and of a call that it allows, in a child process."""
    loaded = syscalls.SeccompFilter(program)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            begun = time.process_time()
            syscalls.install_seccomp_filter(loaded)
            installed = time.process_time()
            for _ in range(count):
                os.getppid()
            called = time.process_time()
            os.write(write, struct.pack("dd", installed - begun, (called - installed) / count))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        seconds = struct.unpack("dd", pipe.read())
    os.waitpid(child, 0)
    return seconds[0] * 1e6, seconds[1] * 1e6


# ---- imports


def _compare_imports(name: str, own: str, library: str, target: str | None, rounds: int) -> Result:
    best = [float("inf"), float("inf")]
    installed = load_library(library) is not None
    for _ in range(rounds):
        for index, modules in enumerate((own, library)[: 1 + installed]):
            best[index] = min(best[index], _import_seconds(modules) * 1e3)
    return Result(
        name=name,
        unit="CPU ms",
        ours=best[0],
        peer=library,
        theirs=best[1] if installed else None,
        target=target,
    )


def _import_seconds(modules: str) -> float:
    """Return the CPU seconds of an import in a new interpreter, children included."""
    code = (
        "import time, asyncio, json; begun = time.process_time()\n"
        f"import {modules}\n"
        "import resource; children = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(time.process_time() - begun + children.ru_utime + children.ru_stime)"
    )
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))
