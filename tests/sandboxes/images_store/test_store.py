"""Image store: images are fetched once, complete or absent, limited in size, and never removed while in use."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxError, UsageError
from rookery.sandboxes.images import file_locks, records, store
from rookery.sandboxes.images.image_fetcher import ImageFetcher
from rookery.sandboxes.images.installer import ImageInstaller
from rookery.sandboxes.images.records import ImageRecord
from rookery.sandboxes.images.references import parse_reference
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.images_store.fake_registry import FakeRegistry
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, member, sha256_digest
from tests.sandboxes.owner_process import wait_while


def build_image(seed: int, *shared: bytes, size: int = 300_000) -> BuiltImage:
    data = random.Random(seed).randbytes(size)
    return BuiltImage(
        *shared, build_tar(member(f"data-{seed}", data), *(member(f"n/{at}", b"x") for at in range(50)))
    )


def install(store: ImageStore, path: Path, **more: object) -> ImageRecord:
    return ImageInstaller(store, parse_reference(str(path)), **more).install()  # type: ignore[arg-type]


@pytest.fixture
async def fetcher(store: ImageStore) -> AsyncIterator[ImageFetcher]:
    found = ImageFetcher(store.folder)
    yield found
    await found.close()


async def test_concurrent_requests_fetch_an_image_once(store: ImageStore, fetcher: ImageFetcher) -> None:
    """Two fetchers share nothing but the store, as two processes do."""
    one = build_image(1, build_tar(member("base", b"b")))
    other = ImageFetcher(store.folder)
    try:
        with FakeRegistry() as registry:
            name = parse_reference(registry.push("app:1", one))
            uses = await asyncio.gather(
                *(one_fetcher.acquire(name) for _ in range(50) for one_fetcher in (fetcher, other))
            )
            assert len(registry.list_blob_requests()) == 3  # configuration and two layers, once each
        assert {use.record.id for use in uses} == {one.id}
        assert set(store.list_images()[0].used_by) == {os.getpid()}
        for use in uses:
            use.release()
        assert store.list_images()[0].used_by == ()
    finally:
        await other.close()


async def test_cancelled_request_does_not_cancel_the_fetch(store: ImageStore, fetcher: ImageFetcher) -> None:
    gate = threading.Event()
    with FakeRegistry() as registry:
        name = parse_reference(registry.push("app:1", build_image(1)))
        slow = registry.manifests

        class Slow(dict):  # type: ignore[type-arg]
            def get(self, key: object, default: object = None) -> object:
                gate.wait(60)
                return slow.get(key, default)  # type: ignore[call-overload]

        registry.manifests = Slow()
        waiting = asyncio.ensure_future(fetcher.acquire(name))
        await wait_while(lambda: not registry.requests)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        use = await fetcher.acquire(name)
        assert len(registry.list_blob_requests()) == 2
        use.release()


async def test_close_ends_running_fetches(store: ImageStore) -> None:
    gate = threading.Event()
    fetcher = ImageFetcher(store.folder)
    with FakeRegistry() as registry:
        name = parse_reference(registry.push("app:1", build_image(1)))
        registry.blobs = _GatedBlobs(registry.blobs, gate)
        waiting = asyncio.ensure_future(fetcher.acquire(name))
        await wait_while(lambda: not registry.requests)
        await fetcher.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
    store.remove_leftovers()
    assert list((store.folder / "work").iterdir()) == list(store.layers.iterdir()) == []


class _GatedBlobs(dict[str, bytes]):
    def __init__(self, real: dict[str, bytes], gate: threading.Event) -> None:
        super().__init__(real)
        self._gate = gate

    def __getitem__(self, key: str) -> bytes:
        self._gate.wait(60)
        return super().__getitem__(key)


@contextlib.contextmanager
def start_fetch_process(store: ImageStore, path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    request = {"directory": str(store.folder), "reference": parse_reference(str(path)), "parent_pid": os.getpid()}
    command = [
        sys.executable,
        "-m",
        "rookery.sandboxes.images.fetch_process",
        msgspec.json.encode(request).decode(),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.long
def test_killed_fetch_leaves_nothing_partial(store: ImageStore, tmp_path: Path) -> None:
    """The process is killed after each line of its output, and at random moments after that."""
    layers = [build_tar(*(member(f"{at}/{n}", b"x" * 500) for n in range(200))) for at in range(3)]
    path = BuiltImage(*layers).write_layout(tmp_path / "layout")
    before = ImageInstaller(ImageStore(tmp_path / "whole"), parse_reference(str(path))).install()
    chosen = random.Random(5)
    for lines in (1, 2, 4, 5, 6):
        with start_fetch_process(store, path) as process:
            assert process.stdout is not None
            for _ in range(lines):
                if not process.stdout.readline():
                    break
            for _ in range(chosen.randrange(2000)):  # a random moment later
                os.sched_yield()
            process.send_signal(signal.SIGKILL)
            process.wait()
        for record in store.list_records():
            assert store.get_record(record.id) is not None
        for layer in store.layers.iterdir():
            if store.get_layer(layer.name):
                assert len(list(layer.rglob("*"))) == 201
    record = install(store, path)
    assert record.layers == before.layers
    assert all(len(list((store.layers / layer).rglob("*"))) == 201 for layer in record.layers)
    # Partial fetches are removed, except for a child process that has not ended yet.
    store.prune(budget=1 << 40)
    assert [place for place in (store.folder / "work").iterdir() if _is_unlocked(store, place)] == []
    assert {path.name for path in store.layers.iterdir()} == set(record.layers)


def _is_unlocked(store: ImageStore, place: Path) -> bool:
    lock = file_locks.try_lock(store.lock_path("work", place.name), exclusive=True)
    if lock is not None:
        lock.close()
    return lock is not None


def test_unsynced_layer_is_fetched_again_after_a_reboot(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_image(1).write_layout(tmp_path / "layout")
    record = install(store, path)
    (layer,) = record.layers
    (store.layers / layer / "data-1").write_bytes(b"")  # as a crash may leave it
    monkeypatch.setattr("rookery.sandboxes.images.store.read_boot_id", lambda: "the next one")
    assert store.get_record(record.id) is None
    monkeypatch.setattr("rookery.sandboxes.images.installer.read_boot_id", lambda: "the next one")
    install(store, path)
    assert (store.layers / layer / "data-1").stat().st_size == 300_000
    store.sync(record.layers)
    monkeypatch.setattr("rookery.sandboxes.images.store.read_boot_id", lambda: "one more")
    assert store.get_record(record.id) is not None


def test_layer_is_synced_at_once_if_the_boot_id_is_unknown(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("store", "installer"):
        monkeypatch.setattr(f"rookery.sandboxes.images.{module}.read_boot_id", lambda: "")
    record = install(store, build_image(1).write_layout(tmp_path / "layout"))
    (layer,) = record.layers
    info = store.get_layer(layer)
    assert info is not None
    assert info.synced
    unsynced = msgspec.structs.replace(info, synced=False)
    records.write_record(store.folder / "infos" / f"{layer}.json", unsynced)
    assert store.get_layer(layer) is None


def test_least_recently_used_image_is_removed_first(store: ImageStore, tmp_path: Path) -> None:
    base = build_tar(member("base", bytes(range(256)) * 1000))
    paths = {n: build_image(n, base).write_layout(tmp_path / str(n)) for n in range(4)}
    kept = {n: install(store, paths[n]) for n in range(3)}
    for n, record in kept.items():
        use = store.acquire(record.id)
        assert use is not None
        use.release()
        os.utime(store.lock_path("image", record.id), (4e9 + n, 4e9 + n))
    held = store.acquire(kept[0].id)
    assert held is not None
    os.utime(store.lock_path("image", kept[0].id), (1, 1))  # the least recently used, but in use
    budget = store.total_bytes() - 1000
    new = install(store, paths[3], budget=budget)
    ids = {one.id for one in store.list_images()}
    assert {kept[0].id, new.id} <= ids
    assert kept[1].id not in ids
    assert store.total_bytes() <= budget
    # Its base layer is shared, so it stays.
    assert (store.layers / new.layers[0] / "base").stat().st_size == 256_000
    others = [store.acquire(one.id) for one in store.list_images()]
    small = store.total_bytes() + 1000
    with pytest.raises(SandboxError) as raised:
        install(store, paths[1], budget=small)
    assert raised.value.code == "sandbox.image"
    assert {one.id for one in store.list_images()} == {use.record.id for use in others if use is not None}
    for use in (held, *others):
        assert use is not None
        use.release()
    done = store.prune(budget=0)
    assert len(done.images) == len(others)
    assert store.list_images() == list(store.layers.iterdir()) == []
    assert done.bytes > 0


def test_image_used_by_another_process_is_not_removed(store: ImageStore, tmp_path: Path) -> None:
    record = install(store, build_image(1).write_layout(tmp_path / "layout"))
    program = (
        "import sys; from pathlib import Path; from rookery.sandboxes.images.store import ImageStore\n"
        f"use = ImageStore(Path({str(store.folder)!r})).acquire({record.id!r})\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert store.list_images()[0].used_by == (process.pid,)
        done = store.prune(budget=0)
        assert (done.images, done.kept_in_use) == ((), 1)
        process.kill()
        process.wait()
    assert len(store.prune(budget=0).images) == 1


def test_unnamed_image_is_pruned_without_shared_layers(store: ImageStore) -> None:
    base = build_tar(member("base", b"b" * 5000))
    with FakeRegistry() as registry:
        name = parse_reference(registry.push("app:1", build_image(1, base)))
        first = ImageInstaller(store, name).install()
        registry.push("app:1", build_image(2, base))
        second = ImageInstaller(store, name, refresh=True).install()
    assert [one.names for one in store.list_images() if one.id == first.id] == [()]
    done = store.prune(budget=1 << 40)
    assert (done.layers, len(done.images)) == (1, 1)
    assert [one.id for one in store.list_images()] == [second.id]
    assert store.get_record(second.id) is not None


def test_store_of_another_user_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "theirs"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("probed: only root can change the owner of a directory")
    os.chown(where, 1234, 1234)
    with pytest.raises(UsageError, match=f"{where}.*ROOKERY_IMAGES"):
        ImageStore(where).open()


def test_store_is_private(store: ImageStore, tmp_path: Path) -> None:
    install(store, build_image(1).write_layout(tmp_path / "layout"))
    assert store.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("value", ["x", "-1", "1Q", "0", "inf"])
def test_invalid_budget_variable_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_IMAGES_BUDGET", value)
    with pytest.raises(UsageError, match="ROOKERY_IMAGES_BUDGET"):
        store.default_budget()


def test_unreadable_records_count_as_missing(store: ImageStore, tmp_path: Path) -> None:
    record = install(store, build_image(1).write_layout(tmp_path / "layout"))
    (store.folder / "images" / f"{record.id}.json").write_text("{half")
    assert store.get_record(record.id) is None
    assert records.read_record(store.folder / "images" / f"{record.id}.json", ImageRecord) is None
    assert install(store, tmp_path / "layout").id == record.id


def test_zstd_layers_are_decompressed_by_the_zstd_program(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build_tar(member("a", b"a" * 100_000))
    if shutil.which("zstd") is None:
        pytest.skip("probed: no program zstd here")
    packed = subprocess.run(["zstd", "-qc"], input=plain, capture_output=True, check=True).stdout
    one = BuiltImage(plain)
    one.manifest = one.manifest.replace(
        sha256_digest(one.layers[0]).encode(), sha256_digest(packed).encode()
    ).replace(f'"size": {len(one.layers[0])}'.encode(), f'"size": {len(packed)}'.encode())
    one.layers = [packed]
    path = one.write_layout(tmp_path / "layout")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SandboxError, match="zstd") as raised:
        install(store, path)
    assert raised.value.code == "sandbox.image"
    monkeypatch.undo()
    record = ImageInstaller(store, parse_reference(str(path))).install()
    assert (store.layers / record.layers[0] / "a").read_bytes() == b"a" * 100_000
