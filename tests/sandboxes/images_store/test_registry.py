"""Pulling from a registry: real HTTP on the loopback, with injected faults."""

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
from tests.sandboxes.images_store.fake_registry import PASSWORD, TOKEN, USER, FakeRegistry
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, member, sha256_digest

BIG = os.urandom(700_000)
IMAGE = BuiltImage(build_tar(member("one", b"1")), build_tar(member("big", BIG)))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between attempts."""
    monkeypatch.setattr(registry_module, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(registry_module.RegistrySource.__init__, "__kwdefaults__", {"pause": 0.001})


def pull(store: ImageStore, name: str, **more: object) -> ImageRecord:
    return ImageInstaller(store, parse_reference(name), **more).install()  # type: ignore[arg-type]


def content(store: ImageStore, record: ImageRecord, path: str) -> bytes:
    return next(
        found for layer in record.layers[::-1] if (found := store.layers / layer / path).exists()
    ).read_bytes()


def test_image_is_pulled_by_name_once(store: ImageStore) -> None:
    reports: list[ImageProgress] = []
    with FakeRegistry() as registry:
        name = registry.push("team/app:1", IMAGE, ("windows/amd64", sources.host_platform()))
        record = pull(store, name, on_progress=reports.append)
        assert content(store, record, "big") == BIG
        assert record.id == IMAGE.id
        count = len(registry.requests)
        assert pull(store, name) == record
        assert len(registry.requests) == count  # no request was sent
        other = registry.push("team/other:1", BuiltImage(IMAGE.plain[0], build_tar(member("x", b"x"))))
        before = set(registry.list_blob_requests())
        pull(store, other)
        assert (
            len(set(registry.list_blob_requests()) - before) == 2
        )  # its configuration, and the layer that it does not share
    assert reports[0].step == "waiting"
    assert (reports[-1].step, reports[-1].done, reports[-1].layers_done) == ("ready", reports[-1].total, 2)


def test_image_can_be_named_by_digest(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        registry.push("app:1", IMAGE)
        name = f"{registry.host}/app@{sha256_digest(IMAGE.manifest)}"
        assert pull(store, name).id == IMAGE.id
        wrong = f"{registry.host}/app@{sha256_digest(b'other')}"
        registry.manifests["app", sha256_digest(b"other")] = (sources.MANIFESTS[0], IMAGE.manifest)
        with pytest.raises(SandboxError, match=sha256_digest(b"other")[:12]) as raised:
            pull(store, wrong)
        assert raised.value.code == "task.image"


def test_refresh_finds_a_moved_tag(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        name = registry.push("app:1", IMAGE)
        pull(store, name)
        newer = BuiltImage(build_tar(member("new", b"n")))
        registry.push("app:1", newer)
        assert pull(store, name).id == IMAGE.id
        assert pull(store, name, refresh=True).id == newer.id
        assert pull(store, name).id == newer.id


def test_interrupted_download_resumes(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        registry.truncate_after = {sha256_digest(IMAGE.layers[1]): [300_000, 5]}
        record = pull(store, registry.push("app:1", IMAGE))
        assert content(store, record, "big") == BIG
        ranges = [headers["Range"] for _, _, headers in registry.requests if "Range" in headers]
        assert ranges == ["bytes=300000-", "bytes=300005-"]


def test_download_restarts_without_range_support(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        registry.supports_ranges = False
        registry.truncate_after = {sha256_digest(IMAGE.layers[1]): [300_000]}
        assert content(store, pull(store, registry.push("app:1", IMAGE)), "big") == BIG


def test_busy_registry_is_retried(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        registry.busy_responses = 3
        assert pull(store, registry.push("app:1", IMAGE)).id == IMAGE.id


def test_permanently_busy_registry_is_an_infra_fault(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        registry.busy_responses = 1000
        with pytest.raises(SandboxError, match="429") as raised:
            pull(store, registry.push("app:1", IMAGE))
    assert (raised.value.code, raised.value.fault) == ("sandbox.image", "infra")
    with pytest.raises(SandboxError, match=registry.host) as raised:
        pull(store, f"{registry.host}/app:1")
    assert raised.value.code == "sandbox.image"
    assert list((store.folder / "work").iterdir()) == list(store.layers.iterdir()) == []


@pytest.mark.parametrize("corrupt", [1, 1000])
def test_wrong_digest_is_never_stored(store: ImageStore, corrupt: int) -> None:
    with FakeRegistry() as registry:
        name = registry.push("app:1", IMAGE)
        registry.corrupt_responses = {sha256_digest(IMAGE.config): 1, sha256_digest(IMAGE.layers[1]): corrupt}
        with pytest.raises(SandboxError, match=name):  # about a configuration it is final
            pull(store, name)
        if corrupt == 1:
            assert content(store, pull(store, name), "big") == BIG
            return
        with pytest.raises(SandboxError, match=sha256_digest(IMAGE.layers[1])[:12]) as raised:
            pull(store, name)
    assert raised.value.code == "sandbox.image"
    assert store.list_images() == []


def test_credentials_are_not_sent_after_a_redirect(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeRegistry() as cdn, FakeRegistry(auth="password", cdn=cdn) as registry:
        name = registry.push("app:1", IMAGE)
        cdn.blobs = IMAGE.blobs()
        cdn.extra_redirect = True
        _store_login(monkeypatch, tmp_path, registry.host, {"auth": _encode_credentials()})
        assert content(store, pull(store, name), "big") == BIG
        assert len(cdn.requests) == 6
        assert not [headers for _, _, headers in cdn.requests if "Authorization" in headers]
        assert [
            headers for _, path, headers in registry.requests if headers.get("Authorization") == f"Bearer {TOKEN}"
        ]
        # A cut at the other host: its address is signed, and in no message.
        cdn.blobs = {}
        other = registry.push("app:2", BuiltImage(build_tar(member("x", b"x"))))
        with pytest.raises(SandboxError) as raised:
            pull(store, other)
        assert "s3cret" not in str(raised.value)


def _encode_credentials() -> str:
    return base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def _store_login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, entry: dict[str, str] | None, **more: object
) -> None:
    where = tmp_path / "docker"
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps({"auths": {host: entry} if entry else {}, **more}))
    monkeypatch.setenv("DOCKER_CONFIG", str(where))


@pytest.mark.parametrize("how", ["anonymous", "password", "identity", "basic", "helper", "store"])
def test_credentials_come_from_dockers_configuration(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    auth = how if how in ("anonymous", "identity", "basic") else "password"
    with FakeRegistry(auth=auth) as registry:
        name = registry.push("app:1", IMAGE)
        if how in ("password", "basic"):
            _store_login(monkeypatch, tmp_path, registry.host, {"auth": _encode_credentials()})
        elif how == "identity":
            _store_login(monkeypatch, tmp_path, registry.host, {"identitytoken": PASSWORD})
        elif how in ("helper", "store"):
            _install_helper(monkeypatch, tmp_path, registry.host)
            named = {"credHelpers": {registry.host: "test"}} if how == "helper" else {"credsStore": "test"}
            _store_login(monkeypatch, tmp_path, registry.host, None, **named)
        reports: list[ImageProgress] = []
        assert content(store, pull(store, name, on_progress=reports.append), "big") == BIG
    kept = [path.read_bytes() for path in store.folder.rglob("*") if path.is_file()]
    output = caplog.text + repr(reports)
    for secret in (PASSWORD, TOKEN, _encode_credentials()):
        assert secret not in output
        assert not [data for data in kept if secret.encode() in data]


def _install_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str) -> None:
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
    with FakeRegistry(auth="password") as registry:
        name = registry.push("app:1", IMAGE)
        with pytest.raises(SandboxError, match=f"docker login {registry.host}") as raised:
            pull(store, name)
        assert raised.value.code == "task.image"
        wrong = base64.b64encode(b"robot:wrong").decode()
        _store_login(monkeypatch, tmp_path, registry.host, {"auth": wrong})
        with pytest.raises(SandboxError, match=rf"{registry.host}\b.*\b40[13]\b") as raised:
            pull(store, name)
        assert wrong not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("app:2", ""),
        ("windows:1", "windows/amd64"),
        ("old:1", ""),
        ("odd:1", ""),
    ],
)
def test_missing_or_malformed_image_is_a_task_fault(store: ImageStore, name: str, named: str) -> None:
    with FakeRegistry() as registry:
        registry.push("windows:1", IMAGE, ("windows/amd64",))
        registry.manifests["old", "1"] = ("x", b'{"schemaVersion": 1}')
        registry.manifests["odd", "1"] = ("x", b"<html>")
        with pytest.raises(SandboxError, match=f"{name}.*{named}") as raised:
            pull(store, f"{registry.host}/{name}")
    assert raised.value.code == "task.image"


def test_layer_longer_than_its_manifest_is_refused(store: ImageStore) -> None:
    with FakeRegistry() as registry:
        name = registry.push("app:1", IMAGE)
        registry.blobs[sha256_digest(IMAGE.layers[0])] += bytes(1000)
        with pytest.raises(RookeryError, match=sha256_digest(IMAGE.layers[0])[:12]):
            pull(store, name)
