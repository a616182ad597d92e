"""Build contexts: files of one directory, without following symbolic links."""

import tarfile
from pathlib import Path

from rookery.sandboxes.images.dockerfile import DockerfileSource
from rookery.sandboxes.images.references import parse_reference


def pack_context(dockerfile: Path, work: Path) -> dict[str, tuple[bytes, str, bytes]]:
    """Return name → (type, target of a link, content) of the packed context."""
    DockerfileSource(dockerfile, "shown", work).pack(work / "context.tar")
    with tarfile.open(work / "context.tar") as tar:
        return {
            info.name: (
                info.type,
                info.linkname,
                body.read() if info.isreg() and (body := tar.extractfile(info)) else b"",
            )
            for info in tar
        }


def test_build_context_keeps_links_and_drops_ignored_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("hunter2")
    folder = tmp_path / "context"
    (folder / "sub").mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (folder / "sub" / "run.sh").write_text("true\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "skipped.log").write_text("x")
    (folder / ".dockerignore").write_text("*.log\n")
    (folder / "file").symlink_to(secret / "key")
    (folder / "folder").symlink_to(secret)
    assert pack_context(folder / "Dockerfile", tmp_path) == {
        ".dockerignore": (tarfile.REGTYPE, "", b"*.log\n"),
        "Dockerfile": (tarfile.REGTYPE, "", b"FROM scratch\n"),
        "file": (tarfile.SYMTYPE, str(secret / "key"), b""),
        "folder": (tarfile.SYMTYPE, str(secret), b""),
        "sub/run.sh": (tarfile.REGTYPE, "", b"true\n"),
    }


def test_linked_dockerfile_does_not_move_the_context(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("key", "Dockerfile"):
        (secret / name).write_text("hunter2")
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "Dockerfile").symlink_to(secret / "Dockerfile")
    found = parse_reference(f"dockerfile:{folder}")
    assert found.path == str(folder / "Dockerfile")
    assert pack_context(Path(found.path), tmp_path) == {
        "Dockerfile": (tarfile.SYMTYPE, str(secret / "Dockerfile"), b""),
    }
