"""Install an image in the store: find it, fetch its layers, unpack them and publish the image. Blocking.

Runs in the child process that fetches an image, and in `rookery images`.

Guarantees:
- concurrent installations of the same image fetch it once, and those of images that share layers fetch these once;
- layers that are in the store are neither fetched nor unpacked again;
- an installation that fails or is killed publishes nothing partial;
- the size limit of the store (the budget) is kept: the least recently used images are removed first, those in use
  stay, and an image that does not fit is refused.

Locks and thread pools limit the number of parallel installations that use the store, and the downloads and
unpacking processes of each installation.
"""

import contextlib
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.docker.client import find_running_engine
from rookery.sandboxes.images import dockerfile, file_locks, overlay, records, registry, sources
from rookery.sandboxes.images.engine_images import EngineImages, EngineSource, has_changed_in_engine
from rookery.sandboxes.images.progress import OnProgress, ProgressReporter
from rookery.sandboxes.images.records import ImageConfig, ImageName, ImageRecord, LayerInfo
from rookery.sandboxes.images.references import ImageReference, familiar_name, is_image_name, parse_reference
from rookery.sandboxes.images.sources import FileRange, LayerBlob, ResolvedImage, Source, image_unavailable
from rookery.sandboxes.images.staging import measure_tree
from rookery.sandboxes.images.store import ImageStore, default_budget
from rookery.sandboxes.images.unpacker import UNPACK_COMMAND
from rookery.sandboxes.leases import read_boot_id
from rookery.sandboxes.local.keeper.factory import FIRST_UID

MAX_PARALLEL = 4
"""Largest number of parallel installations that use a store, and of parallel downloads of one installation."""
WAIT_SECONDS = 3600.0
_ZSTD = b"\x28\xb5\x2f\xfd"


class ImageInstaller:
    """The installation of one image."""

    def __init__(
        self,
        store: ImageStore,
        reference: ImageReference,
        *,
        platform: str = "",
        refresh: bool = False,
        name: str = "",
        source_names: bool = False,
        on_progress: OnProgress | None = None,
        budget: int | None = None,
    ) -> None:
        """Prepare the installation.

        `platform` is the required platform, by default that of this machine. With `refresh`, the source is
        consulted even if the store has the image. `name` is an additional name for the image. With `source_names`,
        the names by which the source knows the image are published, too. `budget` is the size limit of the store
        in bytes.
        """
        self.store = store.open()
        self.reference = reference
        self.platform = platform or sources.host_platform()
        self.refresh = refresh
        self.name = name
        self.source_names = source_names
        self.display_name = familiar_name(reference.name) if reference.registry else reference.text
        self.key = reference.key
        if reference.kind == "dockerfile":
            self.key = f"dockerfile:{reference.path}:{dockerfile.hash_context(Path(reference.path))}"
        if self.platform != sources.host_platform():
            self.key = f"{self.key} {self.platform}"
        self.budget = default_budget() if budget is None else budget
        self.owners = _can_set_owners()
        self.progress = ProgressReporter(self.display_name, on_progress)
        self.stop = threading.Event()
        self._cpus = threading.Semaphore(len(os.sched_getaffinity(0)))
        self._children: set[subprocess.Popen[bytes]] = set()

    def install(self) -> ImageRecord:
        store = self.store
        self.progress.set_step("waiting")
        hashed = hashlib.sha256(self.key.encode()).hexdigest()[:32]
        with file_locks.acquire_lock(
            store.lock_path("make", hashed),
            exclusive=True,
            seconds=WAIT_SECONDS,
            what=f"the image {self.display_name}",
        ):
            found = None if self.refresh else self._find_installed()
            if found is None:
                with file_locks.acquire_slot(store.folder / "locks", "slot", MAX_PARALLEL, seconds=WAIT_SECONDS):
                    found = self._install()
        self.progress.set_step("ready", complete=True)
        return found

    def _find_installed(self) -> ImageRecord | None:
        known = self.store.find_name(self.key)
        if known is None or (known.origin == "engine" and has_changed_in_engine(known)):
            return None
        record = self.store.get_record(known.image)
        if record is not None and self.name:
            self.store.put_image(record, [msgspec.structs.replace(known, name=self.name)])
        return record

    def _install(self) -> ImageRecord:
        self.progress.set_step("finding")
        with self.store.staging_directory() as (staging, lock):
            if self.reference.kind == "folder":
                return self._copy_directory(staging)
            source, resolved = self._resolve(staging)
            try:
                return self._install_resolved(source, resolved, staging, lock)
            finally:
                self.stop.set()
                source.close()

    def _resolve(self, staging: Path) -> tuple[Source, ResolvedImage]:
        """Return the first source that has the image, and the image's description. Raise if no source has it."""
        last: SandboxError | None = None
        for source in self._sources(staging):
            try:
                return source, source.resolve()
            except SandboxError as error:
                source.close()
                if error.code != "task.image" or self.reference.kind != "name":
                    raise
                last = error
        raise last or records.unusable_image(self.display_name, "no container engine answers")

    def _sources(self, staging: Path) -> Iterator[Source]:
        reference, path = self.reference, self.reference.path
        match reference.kind:
            case "oci" | "oci-archive":
                yield sources.OciLayoutSource(path, reference.tag, self.display_name, self.platform)
            case "docker-archive":
                yield sources.DockerArchiveSource(path, reference.tag, self.display_name)
            case "tar":
                yield sources.RootfsSource(path, self.display_name)
            case "dockerfile":
                yield dockerfile.DockerfileSource(Path(path), self.display_name, staging)
            case _:
                client = find_running_engine() if reference.kind != "registry" else None
                if client is not None and self.platform == sources.host_platform():
                    yield EngineSource(reference, EngineImages(client), staging)
                if reference.kind != "engine":
                    yield registry.RegistrySource(reference, self.platform)

    # ---- layers

    def _install_resolved(
        self, source: Source, resolved: ResolvedImage, staging: Path, lock: file_locks.FileLock
    ) -> ImageRecord:
        config, diff_ids, platform = ImageConfig(), [blob.diff_id for blob in resolved.layers], self.platform
        if resolved.layered:
            config, diff_ids, platform = records.parse_config(self.display_name, resolved.config)
        if platform.partition("/")[2] not in ("", self.platform.split("/")[1]):
            raise records.unusable_image(
                self.display_name, f"it is built for {platform}, but {self.platform} is required"
            )
        whole = sum(blob.size for blob in resolved.layers)
        if whole > self.budget:
            raise self._too_large(whole)
        self._free_space(whole)
        with contextlib.ExitStack() as locks:
            pool = ThreadPoolExecutor(MAX_PARALLEL)
            locks.callback(self._stop_all, pool)
            layers = self._install_layers(source, resolved, diff_ids, staging, lock, pool, locks)
            digest = records.sha256_digest(resolved.config) if resolved.layered else f"sha256:{layers[0]}"
            paths = [self.store.layers / name for name in reversed(layers)]
            record = ImageRecord(
                id=digest.removeprefix("sha256:"),
                layers=tuple(layers),
                config=config,
                platform=platform,
                made=time.time(),
                uid=overlay.find_user_id(paths, config.user),
                made_workdir=overlay.has_directory(paths, config.workdir),
            )
            self._publish(record, resolved)
        return record

    def _install_layers(
        self,
        source: Source,
        resolved: ResolvedImage,
        diff_ids: list[str],
        staging: Path,
        lock: file_locks.FileLock,
        pool: ThreadPoolExecutor,
        locks: contextlib.ExitStack,
    ) -> list[str]:
        """Fetch, unpack and lock every layer that is missing; return the names of all layers, lowest first.

        All processes lock layers from the lowest to the uppermost, so that no two wait for each other.
        """
        chain, names = "", list[str]()
        pending: list[tuple[str, file_locks.FileLock, Future[tuple[Path, dict[str, Any]]] | None]] = []
        self.progress.begin(sum(blob.size for blob in resolved.layers), len(resolved.layers))
        for index, (blob, diff_id) in enumerate(zip(resolved.layers, diff_ids, strict=True)):
            chain = records.chain_id(chain, diff_id) if diff_id else self._identify_archive(blob)
            name = records.layer_directory_name(chain)
            layer_lock, exists = self.store.lock_layer(name, seconds=WAIT_SECONDS)
            locks.callback(layer_lock.close)
            if exists:
                self.progress.add_bytes(blob.size)
            target = staging / f"layer-{index}"
            done = (
                None
                if exists
                else pool.submit(self._fetch_layer, source, blob, target, lock, layered=resolved.layered)
            )
            pending.append((name, layer_lock, done))
        for name, layer_lock, made in pending:
            if made is not None:
                target, result = made.result()
                below = [self.store.layers / under for under in reversed(names)]
                overlay.finalize_layer(
                    target, below, result["implied_directories"], result["whiteouts"], owners=self.owners
                )
                info = LayerInfo(
                    diff_id=result["diff_id"],
                    bytes=result["bytes"],
                    entries=result["entries"],
                    boot=read_boot_id(),
                    opaque=result["opaque"],
                )
                self.store.put_layer(name, target, info)
                if not layer_lock.downgrade() or self.store.get_layer(name) is None:
                    raise image_unavailable(
                        f"the image {self.display_name} could not be stored",
                        "its layers were removed by another process",
                    )
            known = self.store.get_layer(name)
            if known is not None and known.opaque:
                names.clear()  # overlayfs ignores the opaque attribute of a layer's root directory
            names.append(name)
        return names

    def _identify_archive(self, blob: LayerBlob) -> str:
        """Return an identifier for an archive that has no digest, derived from its path, size and time."""
        return records.sha256_digest(f"{self.key} {blob.size}".encode())

    def _fetch_layer(
        self, source: Source, blob: LayerBlob, target: Path, lock: file_locks.FileLock, *, layered: bool
    ) -> tuple[Path, dict[str, Any]]:
        """Fetch and unpack a layer; return its directory and the unpacker's result. Runs in a thread."""
        self._raise_if_stopped()
        fetched = target.with_suffix(".blob")
        span = source.fetch(blob, fetched, self._count)
        with self._cpus:
            self._raise_if_stopped()
            target.mkdir(mode=0o755)
            result = self._unpack(span, blob, target, lock, layered=layered)
        fetched.unlink(missing_ok=True)
        if "error" in result:
            if result["fault"] == "image":
                raise records.unusable_image(
                    self.display_name, f"one of its layers cannot be unpacked: {result['error']}"
                )
            raise image_unavailable(f"the image {self.display_name} could not be unpacked", result["error"])
        self.progress.add_layer()
        return target, result

    def _count(self, count: int) -> None:
        self._raise_if_stopped()
        self.progress.add_bytes(count)

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise image_unavailable(
                f"the image {self.display_name} was not installed", "the installation was stopped"
            )

    def _unpack(
        self, span: FileRange, blob: LayerBlob, target: Path, lock: file_locks.FileLock, *, layered: bool
    ) -> dict[str, Any]:
        length = span.length
        with contextlib.ExitStack() as stack:
            fd = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if os.pread(fd, 4, span.offset) == _ZSTD:
                fd = self._start_zstd(fd, span, stack)
                length = self.budget + 1
            else:
                os.lseek(fd, span.offset, os.SEEK_SET)
            arguments = [
                str(target),
                str(length),
                blob.diff_id,
                str(int(self.owners)),
                str(int(layered)),
                str(self.budget),
            ]
            child = subprocess.Popen(
                [*UNPACK_COMMAND, *arguments],
                stdin=fd,
                stdout=subprocess.PIPE,
                pass_fds=(lock.fd,),  # while the child lives, its staging directory is not a leftover
                env={"LC_ALL": "C.UTF-8"},
            )
            self._children.add(child)
            stack.callback(self._reap, child)
            assert child.stdout is not None
            result: dict[str, Any] = {}
            for line in child.stdout:
                result = msgspec.json.decode(line)
                self._raise_if_stopped()
        if "read" in result or not result:
            return {"error": f"the unpacking process ended with exit code {child.returncode}", "fault": "disk"}
        return result

    def _start_zstd(self, fd: int, span: FileRange, stack: contextlib.ExitStack) -> int:
        """Start the program `zstd` on a layer; return a descriptor of its output.

        Python has no module for zstd before 3.14.
        """
        import shutil

        program = shutil.which("zstd")
        if program is None:
            raise SandboxError(
                f"the image {self.display_name} has layers compressed with zstd, but the program `zstd` is not "
                "installed (Debian: apt install zstd)",
                cause="sandbox.image",
            )
        if span.offset:
            raise records.unusable_image(
                self.display_name, "a layer inside an archive is compressed with zstd, which is not supported"
            )
        os.lseek(fd, 0, os.SEEK_SET)
        helper = subprocess.Popen([program, "-dcq", "--no-check"], stdin=fd, stdout=subprocess.PIPE)
        self._children.add(helper)
        stack.callback(self._reap, helper)
        assert helper.stdout is not None
        return helper.stdout.fileno()

    def _reap(self, child: "subprocess.Popen[bytes]") -> None:
        if child.poll() is None:
            # The child exits after its last message; otherwise its result is not needed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.0 if self.stop.is_set() else 5.0)
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
        self._children.discard(child)

    def _stop_all(self, pool: ThreadPoolExecutor) -> None:
        """Stop all threads and child processes of this installation."""
        self.stop.set()
        for child in list(self._children):
            child.kill()
        pool.shutdown(wait=True, cancel_futures=True)

    # ---- publication

    def _publish(self, record: ImageRecord, resolved: ResolvedImage) -> None:
        name = ImageName(
            name=self.key, image=record.id, origin=resolved.origin, digest=resolved.digest, at=time.time()
        )
        called = [self.name] if self.name else []
        if self.source_names:
            called += [parse_reference(text).name for text in resolved.names if is_image_name(text)]
        names = [name, *(msgspec.structs.replace(name, name=one) for one in called)]
        with self.store.lock_store():
            before = self.store.get_record(record.id)
            self.store.put_image(before or record, names)
        if self.store.total_bytes() > self.budget:
            self.store.shrink(self.budget, keep=record.id)
            held = self.store.total_bytes()
            if held > self.budget and before is None:
                with contextlib.suppress(OSError):
                    self._withdraw(record, names)
                raise self._too_large(held)

    def _withdraw(self, record: ImageRecord, names: list[ImageName]) -> None:
        with self.store.lock_store():
            self.store.unpublish(record, names)

    def _free_space(self, wanted: int) -> None:
        """Remove images until `wanted` bytes, the compressed size of an image, fit into the store.

        Unpacked layers are rarely smaller than the compressed data.
        """
        if self.store.total_bytes() + wanted > self.budget:
            self.store.shrink(max(0, self.budget - wanted))

    def _too_large(self, size: int) -> SandboxError:
        return image_unavailable(
            f"the image {self.display_name} does not fit into the image store",
            f"its budget is {self.budget / 2**30:.3g} GB, but {size / 2**30:.3g} GB are needed or in use; raise "
            "ROOKERY_IMAGES_BUDGET, or run `rookery images prune`",
        )

    def _copy_directory(self, staging: Path) -> ImageRecord:
        """Install an image with a single layer, a copy of a directory with a root file system."""
        from rookery.sandboxes.local.keeper import overlay_layers

        name = records.layer_directory_name(records.sha256_digest(f"{self.key} {time.time_ns()}".encode()))
        target = staging / "copy"
        target.mkdir(mode=0o755)
        old, new = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (self.reference.path, target))
        try:
            overlay_layers.copy(old, new)
        except OSError as error:
            raise image_unavailable(
                f"the directory {self.display_name} could not be copied", error.strerror or str(error)
            ) from error
        finally:
            os.close(old)
            os.close(new)
        info = LayerInfo(diff_id="", bytes=measure_tree(target)[1], boot=read_boot_id())
        layer_lock, _ = self.store.lock_layer(name, seconds=WAIT_SECONDS)
        with layer_lock:
            self.store.put_layer(name, target, info)
            if not layer_lock.downgrade():
                raise image_unavailable(
                    f"the directory {self.display_name} could not be stored", "it was removed by another process"
                )
            record = ImageRecord(id=name, layers=(name,), platform=self.platform, made=time.time())
            self._publish(record, ResolvedImage(config=b"", layers=(), origin="file"))
        return record


def _can_set_owners() -> bool:
    """Return whether this process can set owners of files: it is root and has the user IDs of sandboxes."""
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= FIRST_UID < first + count:
            return True
    return False
