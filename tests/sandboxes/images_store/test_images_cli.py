"""The command `rookery images`."""

import json
import os
from pathlib import Path

import pytest

from rookery.cli.app import run_app
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.images_store.fake_registry import FakeRegistry
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, member
from tests.sandboxes.root_filesystems import build_root_filesystem, pack_root_filesystem

Capture = pytest.CaptureFixture[str]


def run_images_cli(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = run_app(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_pull_list_and_prune(capsys: Capture, store: ImageStore) -> None:
    made = BuiltImage(build_tar(member("a", b"a" * 5000)), build_tar(member("b", b"b")))
    code, out, err = run_images_cli(capsys, "images", "list")
    assert (code, out) == (0, "")
    assert err
    with FakeRegistry() as registry:
        name = registry.push("team/app:1", made)
        code, out, err = run_images_cli(capsys, "images", "pull", name)
        assert (code, out.split()[:2]) == (0, [name, made.id[:12]])
        assert f"{name}: " in err
        code, out, _ = run_images_cli(capsys, "images", "pull", "--json", name)
        assert json.loads(out) | {"bytes": 0} == {
            "image": name,
            "id": made.id,
            "layers": 2,
            "bytes": 0,
            "platform": store.list_images()[0].platform,
            "names": [name],
        }
    code, out, err = run_images_cli(capsys, "images", "list")
    assert (code, made.id[:12] in out, name in out) == (0, True, True)
    use = store.acquire(made.id)
    assert use is not None
    (line,) = run_images_cli(capsys, "images", "list", "--json")[1].splitlines()
    assert json.loads(line)["used_by"] == [os.getpid()]
    code, out, err = run_images_cli(capsys, "images", "prune", "--all")
    assert (code, " 0 B" in out, " 1 " in err) == (0, True, True)
    assert len(store.list_images()) == 1
    use.release()
    code, out, _ = run_images_cli(capsys, "images", "prune", "--to", "1G")
    assert " 0 " in out
    assert len(store.list_images()) == 1
    code, out, _ = run_images_cli(capsys, "images", "prune", "--all", "--json")
    assert json.loads(out)["images"] == [name]
    assert list(store.layers.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "layout", "saved"])
def test_imported_files_run_by_name(capsys: Capture, tmp_path: Path, kind: str, system_layer: bytes) -> None:
    source = tmp_path / "source"
    if kind == "layout":
        BuiltImage(system_layer).write_layout(source)
    elif kind == "saved":
        BuiltImage(system_layer).save_docker_archive(source, "called:so")
    else:
        build_root_filesystem(source)
        if kind != "folder":
            source = pack_root_filesystem(source, tmp_path / f"source.{kind}", "w:gz" if kind == "tar.gz" else "w")
    assert run_images_cli(capsys, "images", "import", str(source), "mine:1")[0] == 0
    code = run_app(
        ["exec", "--provider", "local", "--image", "mine:1", "--json", "--", "cat", "/etc/of-the-image"]
    )
    out, err = capsys.readouterr()
    assert (code, json.loads(out)["stdout"]) == (0, "image\n"), err
    if kind == "saved":
        assert run_images_cli(capsys, "images", "import", str(source))[0] == 0
        names = json.loads(run_images_cli(capsys, "images", "list", "--json")[1])["names"]
        assert "docker.io/library/called:so" in names


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["pull", "UPPER"], 2, "UPPER"),
        (["pull", "engine:none"], 2, "none"),
        (["pull", "127.0.0.1:9/none:1"], 3, "127.0.0.1:9"),
        (["pull", "./nowhere"], 2, "nowhere"),
        (["pull", "app", "--platform", "x"], 2, "linux/amd64"),
        (["pull"], 2, "NAME"),
        (["import", "nowhere", "mine:1"], 2, "nowhere"),
        (["import", "FOLDER"], 2, "images import"),
        (["import", "FOLDER", "UPPER:1"], 2, "UPPER:1"),
        (["import", "FILE", "mine:1"], 2, "/file"),
        (["prune", "--to", "x"], 2, "--to"),
        (["prune", "--unused", "-1"], 2, "--unused"),
        (["nothing"], 2, "nothing"),
    ],
)
def test_wrong_input_is_reported_with_an_exit_code(
    capsys: Capture, tmp_path: Path, arguments: list[str], code: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.sandboxes.images.registry.ATTEMPTS", 1)
    (tmp_path / "file").write_text("no archive")
    (tmp_path / "folder").mkdir()
    paths = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path / "folder")}
    found, out, err = run_images_cli(capsys, "images", *(paths.get(word, word) for word in arguments))
    assert (found, out) == (code, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert named in last
    assert "Traceback" not in err


def test_unwritable_store_is_reported(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOKERY_IMAGES", str(tmp_path / "file" / "store"))
    code, _, err = run_images_cli(capsys, "images", "list")
    assert code == 2
    assert "ROOKERY_IMAGES" in err
