"""Symbolic links never let a task read other files of this machine, in any format."""

import errno
import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from rookery.core import Task, TaskError, UsageError
from rookery.scoring.swe import test_script
from rookery.tasks import check_tasks, load_tasks, tasks_from
from rookery.tasks.swe import get_swe_task
from rookery.tasks.symlinks import read_inside, resolve_link
from tests.tasks import kit

SECRET = "hunter2"
ROW = {"id": "x", "instruction": "Fix it.", "tests": {"test.sh": "exit 1"}}


@pytest.fixture
def secret(tmp_path):
    return kit.write_files(tmp_path / "private", {"key": SECRET, "folder/key": SECRET})


def links_to(secret: Path, depth: int) -> dict[str, str]:
    """Return links of several kinds that lead to a secret at most `depth` directories above."""
    up = "../" * depth
    return {
        "file": str(secret / "key"),
        "folder": str(secret / "folder"),
        "root": "/",
        "relative": f"{up}{(secret / 'key').relative_to('/')}",
        "system": "/etc/hostname",
        "parents": "..",
    }


def invalid_fields(source: Path, **more) -> set[str]:
    report = check_tasks(source, **more)
    assert SECRET not in str(report)
    assert all(task.invalid for task in load_tasks(source, **more))
    return {one.field for one in report.problems if not one.warning}


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("kind", ["file", "folder", "root", "relative", "system"])
@pytest.mark.parametrize("location", ["/workspace/stolen", "stolen", "/deep/down/stolen", "a/b/stolen"])
def test_row_link_that_leads_outside_is_refused(tmp_path, secret, kind, location):
    link = {"link": links_to(secret, 40)[kind]}
    row = {**ROW, "files": {location: link, "mine": "x"}}
    assert invalid_fields(kit.jsonl(tmp_path / "r.jsonl", row)) == {"files"}


@pytest.mark.parametrize("field", ["tests", "solution", "dockerfile"])
def test_outside_links_of_tests_solutions_and_build_contexts_are_refused(tmp_path, secret, field):
    needed = {"tests": "test.sh", "solution": "solve.sh", "dockerfile": "Dockerfile"}[field]
    for link in links_to(secret, 40).values():
        row = {**ROW, field: {needed: "exit 0", "d/x": {"link": link} if link != ".." else {"link": "../.."}}}
        assert invalid_fields(kit.jsonl(tmp_path / "r.jsonl", row)) == {field}
    row = {**ROW, "dockerfile": {"Dockerfile": {"link": str(secret / "key")}}}
    assert invalid_fields(kit.jsonl(tmp_path / "r.jsonl", row)) == {"dockerfile"}


@pytest.mark.parametrize(
    "files",
    [
        {"a": {"link": "."}, "b": {"link": "a/../.."}},
        {"x/y/l": {"link": ".."}, "x/y/m": {"link": "l/../../etc"}},
        {"a": {"link": "b"}, "b": {"link": "c"}, "c": {"link": "/etc"}},
        {"a": {"link": "b/hostname"}, "b": {"link": "/etc"}},
        {"/workspace/a": {"link": "../etc/hostname"}},
        {"/srv/app/a": {"link": "../../etc/hostname"}},
    ],
)
def test_chain_of_links_that_leads_outside_is_refused(tmp_path, files):
    assert invalid_fields(kit.jsonl(tmp_path / "r.jsonl", {**ROW, "files": files})) == {"files"}


def test_links_inside_a_row_stay_links(tmp_path):
    files = {
        "v1/a": "x",
        "current": {"link": "v1"},
        "deep/down/up": {"link": "../../current/a"},
        "dangling": {"link": "not/there"},
        "circle": {"link": "circle"},
        "/srv/app/releases/1/b": "y",
        "/srv/app/current": {"link": "releases/1"},
        "/srv/app/abroad": {"link": "../app/current/b"},
    }
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", {**ROW, "files": files}))
    assert not task.invalid
    parts = {part.target: Path(part.source) for part in get_swe_task(task).files}
    assert os.readlink(parts["/workspace"] / "current") == "v1"
    assert os.readlink(parts["/srv/app/current"]) == "releases/1"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".parquet"])
def test_every_file_of_rows_is_checked(tmp_path, secret, suffix):
    row = {**ROW, "files": {"stolen": {"link": str(secret / "key")}}}
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif suffix == ".json":
        path.write_text(json.dumps([row]))
    else:
        text = f"{json.dumps(row)}\n".encode()
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    assert invalid_fields(path) == {"files"}


def test_rows_from_python_are_checked(secret):
    (task,) = tasks_from([{**ROW, "files": {"stolen": {"link": str(secret)}}}], "rows")
    assert task.invalid


# ------------------------------------------------------------------------------------------------ other ways


@pytest.mark.parametrize("image", ["/", "/etc", "./private", "private", "dockerfile:/etc", "oci:/etc", "~"])
def test_row_image_is_a_name_and_never_a_local_path(tmp_path, secret, monkeypatch, image):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "x", "image": image}
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", row))
    (same,) = tasks_from([row], "rows")
    if image == "private":  # a name that is also a path means the name
        assert task.image == same.image == "docker.io/library/private:latest"
    else:
        assert task.invalid
        assert same.invalid
    (own,) = tasks_from([Task(id="t", image=image)], "tasks")
    assert own.image == image


def test_row_cannot_contain_a_swe_task_description(tmp_path, secret):
    described = {
        "id": "x",
        "format": "rows",
        "folder": str(secret),
        "files": [{"source": str(secret / "key"), "target": "/workspace/stolen"}],
        "steps": [{"instruction": "x", "tests": [{"source": str(secret), "target": "/tests"}]}],
    }
    rows = ({"prompt": "x", "swe": described}, {"prompt": "x", "data": {"swe": described}})
    assert all(task.invalid for task in load_tasks(kit.jsonl(tmp_path / "r.jsonl", *rows)))
    (task,) = load_tasks(kit.jsonl(tmp_path / "s.jsonl", {**ROW, "swe": described, "data": {"swe": described}}))
    assert str(secret) not in json.dumps(task.data)


def test_row_context_must_be_in_the_directory_of_the_rows(tmp_path, secret):
    here = kit.write_files(tmp_path / "tasks", {"problems.txt": "mine", "docs/a": "mine"})
    (here / "out").symlink_to(secret)
    (here / "inside").symlink_to("problems.txt")
    rows = [
        {"context_file": "problems.txt"},
        {"context_file": str(here / "problems.txt")},
        {"context_folder": "docs"},
        {"context_file": "inside"},
        {"context_file": str(secret / "key")},
        {"context_file": "../private/key"},
        {"context_file": "out/key"},
        {"context_folder": "out"},
        {"context_folder": "/"},
        {"data": {"context_file": "/etc/passwd"}},
        {"context_file": 7},
        {"context_file": "~/.ssh/id_rsa", "instruction": "x", "tests": "exit 0"},
    ]
    rows = [row if "instruction" in row else {"prompt": "x", **row} for row in rows]
    tasks = load_tasks(kit.jsonl(here / "r.jsonl", *rows))
    good = [task.data.get("context_file", task.data.get("context_folder")) for task in tasks if not task.invalid]
    assert good == [
        *[str(here / "problems.txt")] * 2,
        str(here / "docs"),
        str(here / "problems.txt"),
        str(here / "~/.ssh/id_rsa"),
    ]


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("kind", ["file", "folder", "root", "relative", "system"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (kit.open_instruct, "tests"),
        (kit.open_instruct, "solution"),
        (kit.open_instruct, "environment/seeds"),
        (kit.open_instruct, "environment/image"),
        (kit.harbor, "tests"),
        (kit.harbor, "solution"),
        (kit.harbor, "environment"),
        (kit.harbor, "steps/one/workdir"),
        (kit.harbor, "steps/one/tests"),
    ],
)
def test_symlink_that_leads_out_of_the_task_is_refused(tmp_path, secret, make, name, kind):
    here = make(tmp_path / "t" / "a")
    if name == "environment/image":
        (here / "image.txt").unlink()
    if name.startswith("steps"):
        kit.write_files(here, {"task.toml": '[[steps]]\nname = "one"\n', "steps/one/instruction.md": "Do it."})
    kit.write_files(here, {f"{name}/deep/x": "x", f"{name}/Dockerfile": "FROM scratch\n"})
    (here / name / "deep" / "stolen").symlink_to(links_to(secret, 40)[kind])
    assert name in invalid_fields(tmp_path / "t")


@pytest.mark.parametrize("make", [kit.open_instruct, kit.harbor])
def test_link_between_tasks_of_a_source_is_refused(tmp_path, make):
    kit.write_files(make(tmp_path / "t" / "a"), {"tests/x": "x"})
    other = make(tmp_path / "t" / "b")
    (other / "tests" / "peek").symlink_to("../../a/tests/x")
    assert {one.task for one in check_tasks(tmp_path / "t").problems if not one.warning} == {"b"}


def test_symlinks_inside_a_task_stay_symlinks(tmp_path):
    here = kit.open_instruct(
        tmp_path / "t" / "a", files={"shared/test.sh": "#!/bin/bash\nexit 0\n", "seed/x": "x"}
    )
    for path in (here / "tests").iterdir():
        path.unlink()
    (here / "tests" / "test.sh").symlink_to("../shared/test.sh")
    (here / "tests" / "up").symlink_to("../seed/x")
    (here / "environment").mkdir()
    (here / "environment" / "seeds").symlink_to("../seed")
    (task,) = load_tasks(tmp_path / "t")
    assert not task.invalid, task.invalid
    described = get_swe_task(task)
    assert described.files[0].source == str(here / "seed")
    assert test_script.get_test_command(described, described.steps[0])[0] == "bash"
    with tarfile.open(fileobj=io.BytesIO(test_script.make_archive(described, described.steps[0].tests))) as tar:
        found = {info.name: (info.issym(), info.linkname) for info in tar}
    assert found == {"tests/test.sh": (True, "../shared/test.sh"), "tests/up": (True, "../seed/x")}


def test_archive_with_a_link_outside_is_refused(tmp_path, secret):
    here = kit.open_instruct(tmp_path / "made" / "a")
    (here / "tests" / "stolen").symlink_to(secret / "key")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        archive.add(here, "a")
    with pytest.raises(UsageError, match="'a/tests/stolen'"):
        load_tasks(tmp_path / "t.tar.gz")


# ------------------------------------------------------------------------------------------------ later swaps


def test_link_created_after_loading_is_not_followed(tmp_path, secret):
    here = kit.open_instruct(tmp_path / "t" / "a", files={"tests/more/x": "x"})
    (task,) = load_tasks(tmp_path / "t")
    described = get_swe_task(task)
    (here / "tests" / "more" / "x").unlink()
    (here / "tests" / "more").rmdir()
    (here / "tests" / "more").symlink_to(secret)
    assert SECRET.encode() not in test_script.make_archive(described, described.steps[0].tests)
    (here / "tests").rename(here / "gone")
    (here / "tests").symlink_to(secret)
    with pytest.raises(TaskError):
        test_script.make_archive(described, described.steps[0].tests)
    with pytest.raises(OSError, match="key") as caught:
        read_inside(here, here / "tests" / "key", 100)
    assert caught.value.errno == errno.ELOOP


def test_resolve_link_follows_intermediate_links():
    links = {"a": "b/c", "b": "d", "d/c": "../e", "out": "d/../..", "abs": "/x", "loop": "loop"}
    assert resolve_link("a", links) == "e"
    assert resolve_link("out", links) is None
    assert resolve_link("abs", links) is None
    assert resolve_link("loop", links) == "loop"


def test_source_named_by_a_link_is_read(tmp_path):
    kit.open_instruct(tmp_path / "real" / "a", files={"tests/deep/x": "mine", "setup.sh": "true\n"})
    (tmp_path / "link").symlink_to("real")
    (task,) = load_tasks(tmp_path / "link")
    assert not task.invalid
    described = get_swe_task(task)
    assert described.folder == str(tmp_path / "link" / "a")
    assert b"mine" in test_script.make_archive(described, described.steps[0].tests)
