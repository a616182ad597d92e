"""Find runs and training runs by path or name."""

from pathlib import Path

import msgspec

from rookery.core import UsageError
from rookery.journal import find_journal, run_names, training_journals, training_names
from rookery.trainer.folder import SETTINGS, find_training_run


class ViewedRun(msgspec.Struct, frozen=True):
    """A run, or a training run with the journals of its rollouts."""

    folder: Path
    """Directory of the run or of the training run."""
    journals: tuple[Path, ...]
    """Directories with a journal, newest first. A run has one; a training run has one per time it was started, and
    none before its first rollout."""

    @property
    def is_training(self) -> bool:
        return (self.folder / SETTINGS).is_file()

    @property
    def name(self) -> str:
        return self.folder.name


def find_viewed_run(spec: str, root: Path) -> ViewedRun:
    """Return a run or a training run: a path, a name in `root`, a unique part of a name, or `latest`.

    Raise `UsageError` if nothing matches.
    """
    try:
        journal = find_journal(spec, root)
    except UsageError as error:
        try:
            return open_viewed_run(find_training_run(spec, root))  # it has no rollouts yet
        except UsageError:
            raise error from None
    training = journal.parent.parent
    return open_viewed_run(training if (training / SETTINGS).is_file() else journal)


def open_viewed_run(folder: Path) -> ViewedRun:
    """Return the run or training run in a directory."""
    folder = folder.resolve()
    if (folder / SETTINGS).is_file():
        return ViewedRun(folder, tuple(training_journals(folder)))
    return ViewedRun(folder, (folder,))


def list_viewed_runs(root: Path) -> list[ViewedRun]:
    """Return all runs and training runs in a directory, newest first."""
    names = {*run_names(root), *training_names(root)}
    return [open_viewed_run(root / name) for name in sorted(names, reverse=True)]
