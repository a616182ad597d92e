"""Images of a registry: real HTTP on loopback, with the faults that networks have."""

import base64
import json
import logging
import os
import stat
from pathlib import Path

import pytest

from rookery.core import RookeryError, SandboxError
from rookery.sandboxes.images import registry as registry_module
from rookery.sandboxes.images import sources
from rookery.sandboxes.images.installer import ImageInstaller
from rookery.sandboxes.images.progress import ImageProgress
from rookery.sandboxes.images.records import ImageRecord
from rookery.sandboxes.images.references import parse_reference
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.images_store.fake_registry import PASSWORD, TOKEN, USER, Registry
from tests.sandboxes.images_store.image_builder import Made, digest_of, member, tar_of

BIG = os.urandom(700_000)
IMAGE = Made(tar_of(member("one", b"1")), tar_of(member("big", BIG)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts, not the attempts."""
    monkeypatch.setattr(registry_module, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(registry_module.RegistrySource.__init__, "__kwdefaults__", {"pause": 0.001})


def pulled(store: ImageStore, name: str, **more: object) -> ImageRecord:
    return ImageInstaller(store, parse_reference(name), **more).install()  # type: ignore[arg-type]


def content(store: ImageStore, record: ImageRecord, path: str) -> bytes:
    return next(
        found for layer in record.layers[::-1] if (found := store.layers / layer / path).exists()
    ).read_bytes()


def test_image_is_pulled_by_name_once(store: ImageStore) -> None:
    told: list[ImageProgress] = []
    with Registry() as registry:
        name = registry.push("team/app:1", IMAGE, ("windows/amd64", sources.host_platform()))
        record = pulled(store, name, on_progress=told.append)
        assert content(store, record, "big") == BIG
        assert record.id == IMAGE.id
        count = len(registry.seen)
        assert pulled(store, name) == record
        assert len(registry.seen) == count  # nobody was asked
        other = registry.push("team/other:1", Made(IMAGE.plain[0], tar_of(member("x", b"x"))))
        before = set(registry.fetched())
        pulled(store, other)
        assert (
            len(set(registry.fetched()) - before) == 2
        )  # its configuration, and the layer that it does not share
    assert told[0].step == "waiting"
    assert (told[-1].step, told[-1].done, told[-1].layers_done) == ("ready", told[-1].total, 2)


def test_image_can_be_named_by_digest(store: ImageStore) -> None:
    with Registry() as registry:
        registry.push("app:1", IMAGE)
        name = f"{registry.host}/app@{digest_of(IMAGE.manifest)}"
        assert pulled(store, name).id == IMAGE.id
        wrong = f"{registry.host}/app@{digest_of(b'other')}"
        registry.manifests["app", digest_of(b"other")] = (sources.MANIFESTS[0], IMAGE.manifest)
        with pytest.raises(SandboxError, match="digest") as raised:
            pulled(store, wrong)
        assert raised.value.code == "task.image"


def test_refresh_finds_a_moved_tag(store: ImageStore) -> None:
    with Registry() as registry:
        name = registry.push("app:1", IMAGE)
        pulled(store, name)
        newer = Made(tar_of(member("new", b"n")))
        registry.push("app:1", newer)
        assert pulled(store, name).id == IMAGE.id
        assert pulled(store, name, refresh=True).id == newer.id
        assert pulled(store, name).id == newer.id


def test_interrupted_download_resumes(store: ImageStore) -> None:
    with Registry() as registry:
        registry.cut_after = {digest_of(IMAGE.layers[1]): [300_000, 5]}
        record = pulled(store, registry.push("app:1", IMAGE))
        assert content(store, record, "big") == BIG
        asked = [headers["Range"] for _, _, headers in registry.seen if "Range" in headers]
        assert asked == ["bytes=300000-", "bytes=300005-"]


def test_download_restarts_without_range_support(store: ImageStore) -> None:
    with Registry() as registry:
        registry.ranges = False
        registry.cut_after = {digest_of(IMAGE.layers[1]): [300_000]}
        assert content(store, pulled(store, registry.push("app:1", IMAGE)), "big") == BIG


def test_busy_registry_is_retried(store: ImageStore) -> None:
    with Registry() as registry:
        registry.busy = 3
        assert pulled(store, registry.push("app:1", IMAGE)).id == IMAGE.id


def test_permanently_busy_registry_is_an_infra_fault(store: ImageStore) -> None:
    with Registry() as registry:
        registry.busy = 1000
        with pytest.raises(SandboxError, match="429") as raised:
            pulled(store, registry.push("app:1", IMAGE))
    assert (raised.value.code, raised.value.fault) == ("sandbox.image", "infra")
    with pytest.raises(SandboxError, match=r"refused") as raised:
        pulled(store, f"{registry.host}/app:1")
    assert raised.value.code == "sandbox.image"
    assert list((store.folder / "work").iterdir()) == list(store.layers.iterdir()) == []


@pytest.mark.parametrize("lies", [1, 1000])
def test_wrong_digest_is_never_stored(store: ImageStore, lies: int) -> None:
    with Registry() as registry:
        name = registry.push("app:1", IMAGE)
        registry.lies = {digest_of(IMAGE.config): 1, digest_of(IMAGE.layers[1]): lies}
        with pytest.raises(SandboxError, match="digest"):  # about a configuration it is final
            pulled(store, name)
        if lies == 1:
            assert content(store, pulled(store, name), "big") == BIG
            return
        with pytest.raises(SandboxError, match="digest") as raised:
            pulled(store, name)
    assert raised.value.code == "sandbox.image"
    assert store.list_images() == []


def test_credentials_are_not_sent_after_a_redirect(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry() as cdn, Registry(auth="password", cdn=cdn) as registry:
        name = registry.push("app:1", IMAGE)
        cdn.blobs = IMAGE.blobs()
        cdn.moved = True
        _login(monkeypatch, tmp_path, registry.host, {"auth": _pair()})
        assert content(store, pulled(store, name), "big") == BIG
        assert len(cdn.seen) == 6
        assert not [headers for _, _, headers in cdn.seen if "Authorization" in headers]
        assert [headers for _, path, headers in registry.seen if headers.get("Authorization") == f"Bearer {TOKEN}"]
        # A cut at the other host: its address is signed, and in no message.
        cdn.blobs = {}
        other = registry.push("app:2", Made(tar_of(member("x", b"x"))))
        with pytest.raises(SandboxError) as raised:
            pulled(store, other)
        assert "s3cret" not in str(raised.value)


def _pair() -> str:
    return base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def _login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, said: dict[str, str] | None, **more: object
) -> None:
    where = tmp_path / "docker"
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps({"auths": {host: said} if said else {}, **more}))
    monkeypatch.setenv("DOCKER_CONFIG", str(where))


@pytest.mark.parametrize("how", ["anonymous", "password", "identity", "basic", "helper", "store"])
def test_credentials_come_from_dockers_configuration(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    auth = how if how in ("anonymous", "identity", "basic") else "password"
    with Registry(auth=auth) as registry:
        name = registry.push("app:1", IMAGE)
        if how in ("password", "basic"):
            _login(monkeypatch, tmp_path, registry.host, {"auth": _pair()})
        elif how == "identity":
            _login(monkeypatch, tmp_path, registry.host, {"identitytoken": PASSWORD})
        elif how in ("helper", "store"):
            _helper(monkeypatch, tmp_path, registry.host)
            named = {"credHelpers": {registry.host: "test"}} if how == "helper" else {"credsStore": "test"}
            _login(monkeypatch, tmp_path, registry.host, None, **named)
        told: list[ImageProgress] = []
        assert content(store, pulled(store, name, on_progress=told.append), "big") == BIG
    kept = [path.read_bytes() for path in store.folder.rglob("*") if path.is_file()]
    said = caplog.text + repr(told)
    for secret in (PASSWORD, TOKEN, _pair()):
        assert secret not in said
        assert not [data for data in kept if secret.encode() in data]


def _helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str) -> None:
    where = tmp_path / "bin"
    where.mkdir()
    program = where / "docker-credential-test"
    answer = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
    program.write_text(f'#!/bin/sh\nread -r host || true\n[ "$1 $host" = "get {host}" ] && echo \'{answer}\'\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{where}:{os.environ['PATH']}")


def test_missing_credentials_are_a_task_fault_with_advice(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry(auth="password") as registry:
        name = registry.push("app:1", IMAGE)
        with pytest.raises(SandboxError, match=f"docker login {registry.host}") as raised:
            pulled(store, name)
        assert raised.value.code == "task.image"
        wrong = base64.b64encode(b"robot:wrong").decode()
        _login(monkeypatch, tmp_path, registry.host, {"auth": wrong})
        with pytest.raises(SandboxError, match="refuses the stored credentials") as raised:
            pulled(store, name)
        assert wrong not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("app:2", "does not have it"),
        ("windows:1", "does not support"),
        ("old:1", "obsolete schema"),
        ("odd:1", "malformed"),
    ],
)
def test_missing_or_malformed_image_is_a_task_fault(store: ImageStore, name: str, words: str) -> None:
    with Registry() as registry:
        registry.push("windows:1", IMAGE, ("windows/amd64",))
        registry.manifests["old", "1"] = ("x", b'{"schemaVersion": 1}')
        registry.manifests["odd", "1"] = ("x", b"<html>")
        with pytest.raises(SandboxError, match=words) as raised:
            pulled(store, f"{registry.host}/{name}")
    assert raised.value.code == "task.image"
    assert name in str(raised.value)


def test_layer_longer_than_its_manifest_is_refused(store: ImageStore) -> None:
    with Registry() as registry:
        name = registry.push("app:1", IMAGE)
        registry.blobs[digest_of(IMAGE.layers[0])] += bytes(1000)
        with pytest.raises(RookeryError, match="longer than its manifest says"):
            pulled(store, name)
