"""Image references are parsed like Docker's, and local files take precedence over names."""

import os
from pathlib import Path

import pytest

from rookery.core import UsageError
from rookery.sandboxes.images.references import parse_reference

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12", "docker.io/library/python:3.12"),
        ("team/app", "docker.io/team/app:latest"),
        ("index.docker.io/python", "docker.io/library/python:latest"),
        ("localhost/app:1", "localhost/app:1"),
        ("registry.example:5000/team/app", "registry.example:5000/team/app:latest"),
        (f"registry.example/app@{DIGEST}", f"registry.example/app@{DIGEST}"),
    ],
)
def test_name_means_what_it_means_to_docker(text: str, name: str) -> None:
    assert parse_reference(text).name == name


def test_existing_path_takes_precedence_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_reference("python").kind == "name"
    (tmp_path / "python").mkdir()
    reference = parse_reference("python")
    assert (reference.kind, reference.path) == ("folder", str(tmp_path / "python"))


def test_key_is_equal_for_the_same_name_or_the_same_unchanged_file(tmp_path: Path) -> None:
    assert parse_reference("python").key == parse_reference("docker.io/library/python:latest").key
    archive = tmp_path / "image.tar"
    archive.write_bytes(b"one")
    key = parse_reference(str(archive)).key
    assert parse_reference(f"{tmp_path}/./image.tar").key == key
    os.utime(archive, ns=(0, 0))
    assert parse_reference(str(archive)).key != key


@pytest.mark.parametrize(
    "text",
    ["", " python", "a\0b", "./missing", "/missing", "UPPER", "app@sha256:1", "app:", "oci:missing", "a//b"],
)
def test_invalid_reference_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reference(text)
