"""Tasks of a dataset repository on the Hugging Face hub.

    hf:OWNER/DATASET[@REVISION][:PATH]

Promises:
- what is fetched is one commit, unpacked once on this machine however many processes start together: one asks what
  a revision means, and who waited for it takes its answer;
- without a network, or with HF_HUB_OFFLINE, what was fetched before is used: ours, else the hub's own cache;
- the endpoint and the key are those of `huggingface_hub`'s own configuration; no key is in a message;
- files of a repository that lead out of it are not followed.
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
from rookery.tasks.cache import Cache, key_of

ARCHIVE: Final = "task-data.tar.gz"
SECONDS: Final = 30.0
MAX_BYTES: Final = 200 << 30
_REFERENCE = re.compile(r"hf:([\w][\w.-]*/[\w][\w.-]*)(?:@([^:@\s]+))?(?::(.+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    repo: str
    revision: str = "main"
    path: str = ""


def parse(text: str) -> Asked:
    match = _REFERENCE.fullmatch(text)
    path = (match[3] or "").strip("/") if match else ""
    if match is None or not text.isprintable() or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise UsageError(
            f"{text[:200]!r} names no dataset: write hf:OWNER/DATASET, hf:OWNER/DATASET@REVISION:PATH"
        )
    if "*" in path and ("*" in path.rpartition("/")[0] or not path.endswith(".parquet")):
        raise UsageError(
            f"{text[:200]!r}: stars are for names of Parquet files alone, such as data/train-*.parquet"
        )
    return Asked(text=text, repo=match[1], revision=match[2] or "main", path=path)


def fetched(asked: Asked) -> Path:
    """A folder of tasks, or a file of rows, on this machine."""
    cache = Cache().open()
    commit = _commit(asked, cache)
    key = key_of("hub", asked.repo, commit, asked.path)
    place = cache.once(key, lambda folder: _fetch(asked, commit, folder), asked.text)
    rows = place / asked.path
    return rows if asked.path and rows.is_file() else place


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError:
        raise UsageError("tasks from the hub need huggingface_hub: pip install 'rookery-rl[hub]'") from None
    return huggingface_hub


def _commit(asked: Asked, cache: Cache) -> str:
    """The commit that a revision means now."""
    if _COMMIT.fullmatch(asked.revision):
        return asked.revision
    began = time.time()
    name = f"{asked.repo}@{asked.revision}"
    with cache.alone(key_of("ask", name), asked.text):
        known, when = cache.recall(name)
        if known and when >= began:  # another process asked while we waited
            return known
        library = _library()
        if not library.constants.HF_HUB_OFFLINE:
            try:
                sha = library.HfApi().dataset_info(asked.repo, revision=asked.revision, timeout=SECONDS).sha
            except Exception as error:  # noqa: BLE001  (of another library, which raises those of a third)
                if not _is_absence(error):
                    raise UsageError(_refusal(asked, error)) from None
            else:
                if not isinstance(sha, str) or not _COMMIT.fullmatch(sha):
                    raise UsageError(f"{asked.text}: the hub named no commit for {asked.revision!r}")
                cache.remember(name, sha)
                return sha
        # What the hub's own cache says is newer than what we saw last, if it is there at all.
        snapshot = _kept(library, asked, asked.revision)
        if snapshot is not None:
            return snapshot.name
        if known:
            return known
        raise UsageError(
            f"{asked.text} cannot be had: the hub cannot be reached and nothing of it is on this machine; "
            "fetch it once with a network, or name a folder"
        )


def _kept(library: Any, asked: Asked, revision: str) -> Path | None:
    """What the hub's own cache has of a revision, as far as we need it."""
    wanted = [asked.path, f"{asked.path}/*"] if asked.path else [ARCHIVE]
    for patterns in (wanted, None):
        try:
            snapshot = library.snapshot_download(
                asked.repo, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=True
            )
        except Exception:  # noqa: BLE001, S112  (of another library: whatever it raises, it has none)
            continue
        found = Path(snapshot)
        if patterns is None or _matching(found, wanted[0]):
            return found
    return None


def _fetch(asked: Asked, commit: str, folder: Path) -> None:
    library = _library()
    wanted = [asked.path, f"{asked.path}/*"] if asked.path else None
    offline = bool(library.constants.HF_HUB_OFFLINE)
    try:
        if not offline:
            try:
                info = library.HfApi().dataset_info(
                    asked.repo, revision=commit, timeout=SECONDS, files_metadata=True
                )
            except Exception as error:
                if not _is_absence(error):
                    raise
                offline = True
            else:
                files = {one.rfilename: one.size or 0 for one in info.siblings or []}
                if asked.path and not is_archive(Path(asked.path)):
                    wanted = [asked.path, f"{asked.path}/*", ARCHIVE]
                elif not asked.path and ARCHIVE in files:
                    wanted = [ARCHIVE]
                elif asked.path and asked.path not in files:
                    raise UsageError(f"{asked.text}: the repository holds no {asked.path!r}")
                if sum(files.values()) > MAX_BYTES and wanted is None:
                    raise UsageError(f"{asked.text} holds more than {MAX_BYTES >> 30} GB: name a path in it")
        kept = _kept(library, asked, commit) if offline else None
        if offline and kept is None:
            raise UsageError(
                f"{asked.text}: the hub cannot be reached, and commit {commit} is not on this machine"
            )
        snapshot = kept or _downloaded(library, asked, commit, wanted)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  (as above)
        raise UsageError(_refusal(asked, error)) from None
    _take(asked, snapshot, folder)


def _downloaded(library: Any, asked: Asked, commit: str, wanted: list[str] | None) -> Path:
    # By its name first: so the hub's own cache knows the name too, for who comes without ours.
    for revision in dict.fromkeys((asked.revision, commit)):
        snapshot = Path(
            library.snapshot_download(
                asked.repo, repo_type="dataset", revision=revision, allow_patterns=wanted, etag_timeout=SECONDS
            )
        )
        if snapshot.name == commit:
            return snapshot
    raise UsageError(f"{asked.text}: the hub gave another commit than {commit}")


def _take(asked: Asked, snapshot: Path, folder: Path) -> None:
    """From the hub's cache, whose files are links to its blobs, into a folder of plain files."""
    found = snapshot / asked.path if asked.path else snapshot
    if not asked.path and (snapshot / ARCHIVE).is_file():
        found = snapshot / ARCHIVE
    matching = _matching(snapshot, asked.path) if asked.path else [found]
    if not matching:
        raise UsageError(f"{asked.text}: there is no {asked.path!r} in it on this machine")
    store = Path(os.path.realpath(snapshot.parent.parent))
    if "*" in asked.path:
        for one in matching:
            if one.is_file():
                shutil.copyfile(_own(one, store, asked), folder / one.name)
        _with_data(asked, snapshot, store, folder)
        return
    if found.is_file():
        if is_archive(found):
            unpack(_own(found, store, asked), folder)
            return
        target = folder / asked.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_own(found, store, asked), target)
        _with_data(asked, snapshot, store, target.parent)
        return
    for here, _, names in os.walk(found):
        for name in names:
            source = Path(here, name)
            target = folder / source.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_own(source, store, asked), target)
            # The hub keeps no modes; a script is run by its name often enough.
            target.chmod(0o755 if name.endswith(".sh") else 0o644)


def _with_data(asked: Asked, snapshot: Path, store: Path, folder: Path) -> None:
    """The archive of task data, unpacked beside the rows."""
    if (snapshot / ARCHIVE).is_file():
        (folder / "task-data").mkdir()
        unpack(_own(snapshot / ARCHIVE, store, asked), folder / "task-data")


def _matching(top: Path, path: str) -> list[Path]:
    """What a path of a repository names; its last part may have stars in it."""
    whole = top / path
    if whole.exists() or "*" not in path:
        return [whole] if whole.exists() else []
    return sorted(whole.parent.glob(whole.name))


def _own(path: Path, store: Path, asked: Asked) -> Path:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(store) or not real.is_file():
        raise UsageError(f"{asked.text}: {path.name[:120]!r} leads out of the repository")
    return real


def _is_absence(error: Exception) -> bool:
    """Whether the hub could not be asked, as opposed to: it said no."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500 or status == 429


def _refusal(asked: Asked, error: Exception) -> str:
    """In our own words: those of others may hold addresses with keys."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    advice = "check the name, the revision, and that `hf auth login` was done where it is private"
    if status is None:
        return f"{asked.text} cannot be fetched: {kind}; try again, or name a folder of this machine"
    return f"{asked.text} is refused by the hub with {status} ({kind}): {advice}"
