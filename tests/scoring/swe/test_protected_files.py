"""Which files a submission may not change."""

import posixpath
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scoring.swe import protected_files
from rookery.scoring.swe.submission_transfer import UngradableSubmission, get_host_path, make_link

OWN = ("/workspace",)


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "sub/conftest.py",
        "pytest.ini",
        "a/b/sitecustomize.py",
        "usercustomize.py",
        "x.pth",
        ".coveragerc",
        "jest.config.js",
        "pytest.py",
        "_pytest/__init__.py",
        "unittest.py",
        ".bashrc",
        "evil-1.0.dist-info/entry_points.txt",
        "__pycache__/calc.cpython-311.pyc",
    ],
)
def test_runner_configuration_is_taken_from_the_task(path: str) -> None:
    for how in ("added", "changed", "removed"):
        assert protected_files.find_protected({f"/workspace/{path}": how}, OWN) == {f"/workspace/{path}"}


@pytest.mark.parametrize(
    "path", ["calc.py", "src/types.py", "setup.py", "Makefile", "README", "tests.md", "my_conftest.py"]
)
def test_project_files_are_taken_from_the_submission(path: str) -> None:
    for how in ("added", "changed", "removed"):
        assert protected_files.find_protected({f"/workspace/{path}": how}, OWN) == set()


@pytest.mark.parametrize(
    "path", ["tests/test_a.py", "test_a.py", "pkg/tests/data.json", "a_test.go", "a.test.js", "tests"]
)
def test_existing_tests_are_restored_and_new_tests_are_graded(path: str) -> None:
    place = f"/workspace/{path}"
    assert (
        protected_files.find_protected({place: "changed"}, OWN)
        == protected_files.find_protected({place: "removed"}, OWN)
        == {place}
    )
    assert protected_files.find_protected({place: "added"}, OWN) == set()


@pytest.mark.parametrize(
    ("name", "before", "now", "same"),
    [
        ("pyproject.toml", b"[project]\nname='a'", b"[project]\nname='b'\n[tool.ruff]\nx=1", True),
        ("pyproject.toml", b"", b"[tool.pytest.ini_options]\naddopts='-p x'", False),
        ("pyproject.toml", b"[tool.pytest.ini_options]\na=1", b"[project]\nname='b'", False),
        ("pyproject.toml", b"", b"no toml at all [", False),
        ("setup.cfg", b"[metadata]\na=1", b"[metadata]\na=2", True),
        ("setup.cfg", b"", b"[tool:pytest]\naddopts=-p x", False),
        ("tox.ini", b"", b"[pytest]\naddopts=-p x", False),
        ("package.json", b"", b'{"dependencies": {"a": "1"}}', True),
        ("package.json", b'{"scripts": {"test": "jest"}}', b'{"scripts": {"test": "true"}}', False),
        ("package.json", b"{}", b"[]", False),
    ],
)
def test_mixed_file_is_the_submissions_if_its_runner_settings_are_unchanged(
    name: str, before: bytes, now: bytes, same: bool
) -> None:
    assert protected_files.same_runner_settings(name, before, now) is same


def test_system_programs_and_startup_files_are_restored() -> None:
    programs = {
        "/opt/app/bin/tool",
        "/usr/bin/diff",
        "/usr/local/bin/diff",
        "/usr/local/bin/nginx",
        "/usr/bin/python3",
    }
    changes = {
        "/usr/local/bin/diff": "added",  # has the name of an existing module
        "/usr/local/bin/nginx": "added",  # the task asks for it
        "/usr/bin/python3": "changed",
        "/usr/lib/python3.11/json/__init__.py": "changed",
        "/usr/lib/python3/dist-packages/numpy/core.py": "changed",
        "/usr/lib/python3/dist-packages/_pytest/main.py": "changed",
        "/usr/lib/python3/dist-packages/new/__init__.py": "added",
        "/usr/lib/python3/dist-packages/zz.pth": "added",
        "/usr/lib/python311.zip": "added",
        "/usr/lib/python3.11/email.py": "added",
        "/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libc.so.6": "added",
        "/lib/x86_64-linux-gnu/libnew.so": "added",
        "/opt/app/bin/tool": "changed",
        "/etc/ld.so.preload": "added",
        "/etc/nginx/nginx.conf": "changed",
        "/root/.bashrc": "changed",
        "/workspace/calc.py": "changed",
        "/srv/data": "added",
    }
    remove, restore = protected_files.find_system_changes(changes, OWN, programs)
    assert remove == {
        "/usr/local/bin/diff",
        "/usr/lib/python3/dist-packages/zz.pth",
        "/usr/lib/python311.zip",
        "/usr/lib/python3.11/email.py",
        "/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libc.so.6",
        "/etc/ld.so.preload",
    }
    assert restore == {
        "/opt/app/bin/tool",
        "/usr/bin/python3",
        "/usr/lib/python3.11/json/__init__.py",
        "/usr/lib/python3/dist-packages/_pytest/main.py",
        "/root/.bashrc",
    }


@given(st.text(min_size=1, max_size=30))
def test_no_file_name_leads_out_of_the_host_tree(name: str) -> None:
    tree = Path("/tree")
    try:
        place = get_host_path(tree, f"/workspace/{name}")
    except UngradableSubmission:
        return
    assert posixpath.normpath(place) == str(place)
    assert place.is_relative_to(tree / "workspace")


def test_nothing_is_written_through_links_of_the_submission(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    tree.mkdir()
    outside.mkdir()
    assert make_link(tree, "/workspace/a", str(outside))
    assert not make_link(tree, "/workspace/a/b", "/etc")
    assert list(outside.iterdir()) == []
