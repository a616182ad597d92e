"""Download tasks from dataset repositories on the Hugging Face Hub: `hf:OWNER/DATASET[@REVISION][:PATH]`.

Guarantees:
- A commit is downloaded and unpacked once on this machine, however many processes need it at the same time. One
  process resolves the revision to a commit, and the processes that wait for it use its result.
- Without a network, or with `HF_HUB_OFFLINE`, a copy on this machine is used: from the cache of `huggingface_hub`
  or from Rookery's task cache.
- Endpoint and token are those of the `huggingface_hub` configuration. No token appears in a message.
- A file of a repository that is a symbolic link out of the repository is refused.
"""

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.tasks.archives import is_archive, unpack
from rookery.tasks.cache import TaskCache, make_key

ARCHIVE: Final = "task-data.tar.gz"
TIMEOUT_SECONDS: Final = 30.0
MAX_BYTES: Final = 200 << 30
_REFERENCE = re.compile(r"hf:([\w][\w.-]*/[\w][\w.-]*)(?:@([^:@\s]+))?(?::(.+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubReference(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a reference `hf:OWNER/DATASET[@REVISION][:PATH]` to a dataset repository."""

    text: str
    """The whole reference."""
    repo: str
    """Name of the repository, `OWNER/DATASET`."""
    revision: str = "main"
    """Branch, tag or commit."""
    path: str = ""
    """File or directory in the repository, or a pattern such as `data/train-*.parquet`; empty means everything."""


def parse_reference(text: str) -> HubReference:
    """Parse `hf:OWNER/DATASET[@REVISION][:PATH]`. Raise `UsageError` if it is invalid."""
    match = _REFERENCE.fullmatch(text)
    path = (match[3] or "").strip("/") if match else ""
    if match is None or not text.isprintable() or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise UsageError(
            f"{text[:200]!r} is not a dataset reference: write hf:OWNER/DATASET or hf:OWNER/DATASET@REVISION:PATH"
        )
    if "*" in path and ("*" in path.rpartition("/")[0] or not path.endswith(".parquet")):
        raise UsageError(
            f"{text[:200]!r}: wildcards are supported only in names of Parquet files, such as data/train-*.parquet"
        )
    return HubReference(text=text, repo=match[1], revision=match[2] or "main", path=path)


def fetch(reference: HubReference) -> Path:
    """Return the local path of a directory of tasks or a file of rows on the Hub. Download it if needed."""
    cache = TaskCache().open()
    commit = resolve_commit(reference, cache)
    key = make_key("hub", reference.repo, commit, reference.path)
    folder_path = cache.get_or_create(key, lambda folder: _fetch_into(reference, commit, folder), reference.text)
    rows = folder_path / reference.path
    return rows if reference.path and rows.is_file() else folder_path


def import_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError:
        raise UsageError(
            "loading tasks from the hub requires huggingface_hub: pip install 'rookery-rl[hub]'"
        ) from None
    return huggingface_hub


def resolve_commit(reference: HubReference, cache: TaskCache) -> str:
    """Return the commit that a revision refers to.

    If the Hub cannot be reached, return the last commit known on this machine, or raise `UsageError`.
    """
    if _COMMIT.fullmatch(reference.revision):
        return reference.revision
    began = time.time()
    name = f"{reference.repo}@{reference.revision}"
    with cache.lock_key(make_key("ask", name), reference.text):
        known, when = cache.recall(name)
        if known and when >= began:  # another process resolved it while this one waited
            return known
        library = import_hub()
        if not library.constants.HF_HUB_OFFLINE:
            try:
                sha = (
                    library.HfApi()
                    .dataset_info(reference.repo, revision=reference.revision, timeout=TIMEOUT_SECONDS)
                    .sha
                )
            except Exception as error:  # noqa: BLE001  (huggingface_hub raises exceptions of several libraries)
                if not _is_unreachable(error):
                    raise UsageError(_describe_refusal(reference, error)) from None
            else:
                if not isinstance(sha, str) or not _COMMIT.fullmatch(sha):
                    raise UsageError(f"{reference.text}: the hub returned no commit for {reference.revision!r}")
                cache.remember(name, sha)
                return sha
        # The hub's own cache may be newer than the commit stored here.
        snapshot = _find_cached_snapshot(library, reference, reference.revision)
        if snapshot is not None:
            return snapshot.name
        if known:
            return known
        raise UsageError(
            f"cannot load {reference.text}: the hub cannot be reached and no copy is on this machine; "
            "download it once with a network, or pass a directory"
        )


def _find_cached_snapshot(library: Any, reference: HubReference, revision: str) -> Path | None:
    """Return the snapshot directory of a revision in the cache of `huggingface_hub`.

    Return None if the cache does not contain the required files.
    """
    wanted = [reference.path, f"{reference.path}/*"] if reference.path else [ARCHIVE]
    for patterns in (wanted, None):
        try:
            snapshot = library.snapshot_download(
                reference.repo,
                repo_type="dataset",
                revision=revision,
                allow_patterns=patterns,
                local_files_only=True,
            )
        except Exception:  # noqa: BLE001, S112  (any exception means that there is none)
            continue
        found = Path(snapshot)
        if patterns is None or _match_path(found, wanted[0]):
            return found
    return None


def _fetch_into(reference: HubReference, commit: str, folder: Path) -> None:
    library = import_hub()
    wanted = [reference.path, f"{reference.path}/*"] if reference.path else None
    offline = bool(library.constants.HF_HUB_OFFLINE)
    try:
        if not offline:
            try:
                info = library.HfApi().dataset_info(
                    reference.repo, revision=commit, timeout=TIMEOUT_SECONDS, files_metadata=True
                )
            except Exception as error:
                if not _is_unreachable(error):
                    raise
                offline = True
            else:
                files = {one.rfilename: one.size or 0 for one in info.siblings or []}
                if reference.path and not is_archive(Path(reference.path)):
                    wanted = [reference.path, f"{reference.path}/*", ARCHIVE]
                elif not reference.path and ARCHIVE in files:
                    wanted = [ARCHIVE]
                elif reference.path and reference.path not in files:
                    raise UsageError(f"{reference.text}: the repository does not contain {reference.path!r}")
                if sum(files.values()) > MAX_BYTES and wanted is None:
                    raise UsageError(f"{reference.text} is larger than {MAX_BYTES >> 30} GB: name a path in it")
        kept = _find_cached_snapshot(library, reference, commit) if offline else None
        if offline and kept is None:
            raise UsageError(
                f"cannot load {reference.text}: the hub cannot be reached and commit {commit} is not on this "
                "machine; download it once with a network, or pass a directory"
            )
        snapshot = kept or _download_snapshot(library, reference, commit, wanted)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  (as above)
        raise UsageError(_describe_refusal(reference, error)) from None
    _copy_snapshot(reference, snapshot, folder)


def _download_snapshot(library: Any, reference: HubReference, commit: str, wanted: list[str] | None) -> Path:
    # The revision is tried first, so that the hub's own cache also learns what it refers to.
    for revision in dict.fromkeys((reference.revision, commit)):
        snapshot = Path(
            library.snapshot_download(
                reference.repo,
                repo_type="dataset",
                revision=revision,
                allow_patterns=wanted,
                etag_timeout=TIMEOUT_SECONDS,
            )
        )
        if snapshot.name == commit:
            return snapshot
    raise UsageError(f"{reference.text}: the hub returned another commit than the requested {commit}; try again")


def _copy_snapshot(reference: HubReference, snapshot: Path, folder: Path) -> None:
    """Copy the files that a dataset reference selects to `folder`, and unpack archives of tasks there.

    `reference` has the form `hf:OWNER/DATASET[@REVISION][:PATH]`. `snapshot` is the repository's directory in the
    cache of `huggingface_hub`. It consists of symbolic links; the copies are regular files.
    """
    found = snapshot / reference.path if reference.path else snapshot
    if not reference.path and (snapshot / ARCHIVE).is_file():
        found = snapshot / ARCHIVE
    matching = _match_path(snapshot, reference.path) if reference.path else [found]
    if not matching:
        raise UsageError(f"{reference.text}: {reference.path!r} is not in the copy on this machine")
    store = Path(os.path.realpath(snapshot.parent.parent))
    if "*" in reference.path:
        for one in matching:
            if one.is_file():
                shutil.copyfile(_check_inside(one, store, reference), folder / one.name)
        _unpack_task_data(reference, snapshot, store, folder)
        return
    if found.is_file():
        if is_archive(found):
            unpack(_check_inside(found, store, reference), folder)
            return
        target = folder / reference.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_check_inside(found, store, reference), target)
        _unpack_task_data(reference, snapshot, store, target.parent)
        return
    for here, _, names in os.walk(found):
        for name in names:
            source = Path(here, name)
            target = folder / source.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_check_inside(source, store, reference), target)
            # The hub does not store file modes, and tasks may execute scripts directly.
            target.chmod(0o755 if name.endswith(".sh") else 0o644)


def _unpack_task_data(reference: HubReference, snapshot: Path, store: Path, folder: Path) -> None:
    """Unpack the repository's archive `task-data.tar.gz`, if it has one, into `task-data` in the directory of
    rows.
    """
    if (snapshot / ARCHIVE).is_file():
        (folder / "task-data").mkdir()
        unpack(_check_inside(snapshot / ARCHIVE, store, reference), folder / "task-data")


def _match_path(top: Path, path: str) -> list[Path]:
    """Return the existing paths below `top` that match `path`, whose last component may contain wildcards."""
    whole = top / path
    if whole.exists() or "*" not in path:
        return [whole] if whole.exists() else []
    return sorted(whole.parent.glob(whole.name))


def _check_inside(path: Path, store: Path, reference: HubReference) -> Path:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(store) or not real.is_file():
        raise UsageError(
            f"{reference.text}: {path.name[:120]!r} is not a regular file, or is a link out of the repository"
        )
    return real


def _is_unreachable(error: Exception) -> bool:
    """Return whether an error means that the Hub is unavailable, rather than that it refused the request.

    It is unavailable if there was no response, or if the status is 429 or at least 500.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500 or status == 429


def _describe_refusal(reference: HubReference, error: Exception) -> str:
    """Return a message for an error of the Hub, without its original text, which may contain URLs with tokens."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    advice = "check the name and the revision, and run `hf auth login` if it is private"
    if status is None:
        return f"cannot download {reference.text}: {kind}; try again, or pass a local directory"
    return f"the hub refused {reference.text} with status {status} ({kind}): {advice}"
