"""Makes an image of the store out of a source: finds it, fetches its layers, unpacks them, puts them in place.

Promises:
- it is done once, however many processes ask for the same image or for images that share layers: the others wait;
- layers that are there already are neither fetched nor unpacked again;
- where it fails, or is killed, nothing half-made is in place;
- no more than so many images are made at once on a machine, and no more layers unpacked than it has processors;
- the budget holds: what was unused the longest goes first, what is in use stays; what does not fit is refused.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.images import builders, engine, layer, locks, records, registry, settling, sources
from rookery.sandboxes.images.content import Store, boot, usual_budget
from rookery.sandboxes.images.progress import Bar, OnProgress
from rookery.sandboxes.images.records import Config, LayerInfo, Name, Record
from rookery.sandboxes.images.references import Reference, is_name, parse, shown
from rookery.sandboxes.images.sources import Blob, Found, Source, Span, unavailable
from rookery.sandboxes.local.births import FIRST_UID

AT_ONCE = 4
"""Images in the making on a machine, and layers of one that are fetched at once."""
WAIT_SECONDS = 3600.0
_ZSTD = b"\x28\xb5\x2f\xfd"
_HERE = Path(layer.__file__)


class Making:
    """One image."""

    def __init__(
        self,
        store: Store,
        reference: Reference,
        *,
        platform: str = "",
        again: bool = False,
        name: str = "",
        own_names: bool = False,
        on_progress: OnProgress | None = None,
        budget: int | None = None,
    ) -> None:
        """`again`: its source is asked although the store has it. `name`: what it is to be called besides.
        `own_names`: also what its source calls it, where it says so."""
        self.store = store.open()
        self.reference = reference
        self.platform = platform or sources.here()
        self.again = again
        self.name = name
        self.own_names = own_names
        self.shown = shown(reference.name) if reference.registry else reference.text
        self.key = reference.key
        if reference.kind == "dockerfile":
            self.key = f"dockerfile:{reference.path}:{builders.stamp(Path(reference.path))}"
        if self.platform != sources.here():
            self.key = f"{self.key} {self.platform}"
        self.budget = usual_budget() if budget is None else budget
        self.owners = _owns_users()
        self.bar = Bar(self.shown, on_progress)
        self.stop = threading.Event()
        self._cpus = threading.Semaphore(len(os.sched_getaffinity(0)))
        self._children: set[subprocess.Popen[bytes]] = set()

    def run(self) -> Record:
        store = self.store
        self.bar.step("waiting")
        hashed = hashlib.sha256(self.key.encode()).hexdigest()[:32]
        with locks.wait(
            store.lock_path("make", hashed), alone=True, seconds=WAIT_SECONDS, what=f"the image {self.shown}"
        ):
            found = None if self.again else self._there()
            if found is None:
                with locks.one_of(store.folder / "locks", "slot", AT_ONCE, seconds=WAIT_SECONDS):
                    found = self._make()
        self.bar.step("ready", last=True)
        return found

    def _there(self) -> Record | None:
        known = self.store.named(self.key)
        if known is None or (known.origin == "engine" and engine.changed_in_engine(known)):
            return None
        record = self.store.record(known.image)
        if record is not None and self.name:
            self.store.put_image(record, [msgspec.structs.replace(known, name=self.name)])
        return record

    def _make(self) -> Record:
        self.bar.step("finding")
        with self.store.working() as (work, lock):
            if self.reference.kind == "folder":
                return self._copied(work)
            source, found = self._found(work)
            try:
                return self._made(source, found, work, lock)
            finally:
                self.stop.set()
                source.close()

    def _found(self, work: Path) -> tuple[Source, Found]:
        """A source that has it: the one that is named, or else the first of engine and registry."""
        last: SandboxError | None = None
        for source in self._sources(work):
            try:
                return source, source.find()
            except SandboxError as error:
                source.close()
                if error.code != "task.image" or self.reference.kind != "name":
                    raise
                last = error
        raise last or records.broken(self.shown, "no container engine answers here")

    def _sources(self, work: Path) -> Iterator[Source]:
        reference, path = self.reference, self.reference.path
        match reference.kind:
            case "oci" | "oci-archive":
                yield sources.LayoutSource(path, reference.tag, self.shown, self.platform)
            case "docker-archive":
                yield sources.SavedSource(path, reference.tag, self.shown)
            case "tar":
                yield sources.SystemSource(path, self.shown)
            case "dockerfile":
                yield builders.BuiltSource(Path(path), self.shown, work)
            case _:
                socket = engine.find_socket() if reference.kind != "registry" else ""
                if socket and self.platform == sources.here():
                    yield engine.EngineSource(reference, engine.Engine(socket), work)
                if reference.kind != "engine":
                    yield registry.RegistrySource(reference, self.platform)

    # ---- layers

    def _made(self, source: Source, found: Found, work: Path, lock: locks.Lock) -> Record:
        config, diffs, platform = Config(), [blob.diff for blob in found.layers], self.platform
        if found.layered:
            config, diffs, platform = records.config_of(self.shown, found.config)
        if platform.partition("/")[2] not in ("", self.platform.split("/")[1]):
            raise records.broken(self.shown, f"it is for {platform}, and this machine is {self.platform}")
        whole = sum(blob.size for blob in found.layers)
        if whole > self.budget:
            raise self._too_large(whole)
        self._room(whole)
        with contextlib.ExitStack() as held:
            pool = ThreadPoolExecutor(AT_ONCE)
            held.callback(self._halt, pool)
            layers = self._all(source, found, diffs, work, lock, pool, held)
            digest = records.digest_of(found.config) if found.layered else f"sha256:{layers[0]}"
            paths = [self.store.layers / name for name in reversed(layers)]
            record = Record(
                id=digest.removeprefix("sha256:"),
                layers=tuple(layers),
                config=config,
                platform=platform,
                made=time.time(),
                uid=settling.user_id(paths, config.user),
                made_workdir=settling.has_folder(paths, config.workdir),
            )
            self._publish(record, found)
        return record

    def _all(
        self,
        source: Source,
        found: Found,
        diffs: list[str],
        work: Path,
        lock: locks.Lock,
        pool: ThreadPoolExecutor,
        held: contextlib.ExitStack,
    ) -> list[str]:
        """Every layer, in place and held; their names, lowest first. Bottom up, as everybody does: no two wait
        for each other."""
        chain, names = "", list[str]()
        todo: list[tuple[str, locks.Lock, Future[tuple[Path, dict[str, Any]]] | None]] = []
        self.bar.begin(sum(blob.size for blob in found.layers), len(found.layers))
        for at, (blob, diff) in enumerate(zip(found.layers, diffs, strict=True)):
            chain = records.chain_of(chain, diff) if diff else self._stamp(blob)
            name = records.folder_of(chain)
            mine, there = self.store.hold_layer(name, seconds=WAIT_SECONDS)
            held.callback(mine.close)
            if there:
                self.bar.have(blob.size)
            target = work / f"layer-{at}"
            done = None if there else pool.submit(self._layer, source, blob, target, lock, layered=found.layered)
            todo.append((name, mine, done))
        for name, mine, made in todo:
            if made is not None:
                target, said = made.result()
                below = [self.store.layers / under for under in reversed(names)]
                settling.settle(target, below, said["implied"], said["gone"], owners=self.owners)
                info = LayerInfo(
                    diff=said["diff"],
                    bytes=said["bytes"],
                    entries=said["entries"],
                    boot=boot(),
                    opaque=said["opaque"],
                )
                self.store.put_layer(name, target, info)
                if not mine.shared() or self.store.info(name) is None:
                    raise unavailable(f"the image {self.shown} could not be kept", "its layers were removed again")
            known = self.store.info(name)
            if known is not None and known.opaque:
                names.clear()  # an overlay does not ask the top of a layer whether it hides those below
            names.append(name)
        return names

    def _stamp(self, blob: Blob) -> str:
        """Of an archive whose content nobody signed for: the file that it is."""
        return records.digest_of(f"{self.key} {blob.size}".encode())

    def _layer(
        self, source: Source, blob: Blob, target: Path, lock: locks.Lock, *, layered: bool
    ) -> tuple[Path, dict[str, Any]]:
        """Fetched and unpacked, in one of a few threads."""
        self._not_stopped()
        fetched = target.with_suffix(".blob")
        span = source.fetch(blob, fetched, self._count)
        with self._cpus:
            self._not_stopped()
            target.mkdir(mode=0o755)
            said = self._unpacked(span, blob, target, lock, layered=layered)
        fetched.unlink(missing_ok=True)
        if "error" in said:
            if said["fault"] == "image":
                raise records.broken(self.shown, f"a layer of it cannot be unpacked: {said['error']}")
            raise unavailable(f"the image {self.shown} could not be unpacked", said["error"])
        self.bar.layer()
        return target, said

    def _count(self, count: int) -> None:
        self._not_stopped()
        self.bar.have(count)

    def _not_stopped(self) -> None:
        if self.stop.is_set():
            raise unavailable(f"the image {self.shown} was not finished", "it was stopped")

    def _unpacked(
        self, span: Span, blob: Blob, target: Path, lock: locks.Lock, *, layered: bool
    ) -> dict[str, Any]:
        asked = {
            "target": str(target),
            "length": span.length,
            "diff": blob.diff,
            "owners": self.owners,
            "layered": layered,
            "most": self.budget,
        }
        with contextlib.ExitStack() as stack:
            fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if os.pread(fd, 4, span.offset) == _ZSTD:
                fd = self._unzstd(fd, span, stack)
                asked["length"] = self.budget + 1
            else:
                os.lseek(fd, span.offset, os.SEEK_SET)
            words = [sys.executable, "-I", "-S", str(_HERE), str(_HERE.parent.parent)]
            child = subprocess.Popen(
                [*words, msgspec.json.encode(asked).decode()],
                stdin=fd,
                stdout=subprocess.PIPE,
                pass_fds=(lock.fd,),  # while it lives, its folder is not taken for a leftover
                env={"LC_ALL": "C.UTF-8"},
            )
            self._children.add(child)
            stack.callback(self._reap, child)
            assert child.stdout is not None
            said: dict[str, Any] = {}
            for line in child.stdout:
                said = msgspec.json.decode(line)
                self._not_stopped()
        if "read" in said or not said:
            return {"error": f"the program that unpacks ended with {child.returncode}", "fault": "disk"}
        return said

    def _unzstd(self, fd: int, span: Span, stack: contextlib.ExitStack) -> int:
        """Through the program of that name: Python has no such module before 3.14."""
        import shutil

        program = shutil.which("zstd")
        if program is None:
            raise SandboxError(
                f"the image {self.shown} has layers compressed with zstd, and no program `zstd` is installed "
                "here: install it (Debian: apt install zstd)",
                cause="sandbox.image",
            )
        if span.offset:
            raise records.broken(self.shown, "a layer inside of an archive is compressed with zstd")
        os.lseek(fd, 0, os.SEEK_SET)
        helper = subprocess.Popen([program, "-dcq", "--no-check"], stdin=fd, stdout=subprocess.PIPE)
        self._children.add(helper)
        stack.callback(self._reap, helper)
        assert helper.stdout is not None
        return helper.stdout.fileno()

    def _reap(self, child: "subprocess.Popen[bytes]") -> None:
        if child.poll() is None:
            # It ends by itself after its last word; else what it makes is unwanted.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.0 if self.stop.is_set() else 5.0)
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
        self._children.discard(child)

    def _halt(self, pool: ThreadPoolExecutor) -> None:
        """Nothing goes on after this: threads and programs are gone."""
        self.stop.set()
        for child in list(self._children):
            child.kill()
        pool.shutdown(wait=True, cancel_futures=True)

    # ---- the end of it

    def _publish(self, record: Record, found: Found) -> None:
        name = Name(name=self.key, image=record.id, origin=found.origin, digest=found.digest, at=time.time())
        called = [self.name] if self.name else []
        if self.own_names:
            called += [parse(text).name for text in found.names if is_name(text)]
        names = [name, *(msgspec.structs.replace(name, name=one) for one in called)]
        with self.store.mutex():
            before = self.store.record(record.id)
            self.store.put_image(before or record, names)
        if self.store.held() > self.budget:
            self.store.shrink(self.budget, keep=record.id)
            held = self.store.held()
            if held > self.budget and before is None:
                with contextlib.suppress(OSError):
                    self._withdraw(record, names)
                raise self._too_large(held)

    def _withdraw(self, record: Record, names: list[Name]) -> None:
        with self.store.mutex():
            self.store.forget(record, names)

    def _room(self, wanted: int) -> None:
        """Makes some before it is needed: layers are rarely smaller than what is fetched."""
        if self.store.held() + wanted > self.budget:
            self.store.shrink(max(0, self.budget - wanted))

    def _too_large(self, size: int) -> SandboxError:
        return unavailable(
            f"the image {self.shown} does not fit into the image store",
            f"its budget is {self.budget / 2**30:.3g} GB, what is needed or in use {size / 2**30:.3g} GB; raise "
            "ROOKERY_IMAGES_BUDGET, or `rookery images prune`",
        )

    def _copied(self, work: Path) -> Record:
        """A folder that holds a system, as one layer."""
        from rookery.sandboxes.local import layers

        name = records.folder_of(records.digest_of(f"{self.key} {time.time_ns()}".encode()))
        target = work / "copy"
        target.mkdir(mode=0o755)
        old, new = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (self.reference.path, target))
        try:
            layers.copy(old, new)
        except OSError as error:
            raise unavailable(
                f"the folder {self.shown} could not be copied", error.strerror or str(error)
            ) from error
        finally:
            os.close(old)
            os.close(new)
        info = LayerInfo(diff="", bytes=_size(target), boot=boot())
        mine, _ = self.store.hold_layer(name, seconds=WAIT_SECONDS)
        with mine:
            self.store.put_layer(name, target, info)
            if not mine.shared():
                raise unavailable(f"the folder {self.shown} could not be kept", "it was removed again")
            record = Record(id=name, layers=(name,), platform=self.platform, made=time.time())
            self._publish(record, Found(config=b"", layers=(), origin="file"))
        return record


def _size(top: Path) -> int:
    total = 0
    for here, folders, files in os.walk(top):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(f"{here}/{name}").st_blocks * 512
    return total


def _owns_users() -> bool:
    """Whether boxes are made of users of their own here, who can be the owners of an image's files."""
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= FIRST_UID < first + count:
            return True
    return False
