"""A small file system of its own for the fault campaign, which fills it up: a real full disk."""

import subprocess
from pathlib import Path

DEVICE = "rookery-faults"
SIZE = "256m"
CHUNK = bytes(1 << 20)


class SmallDisk:
    """A tmpfs that is mounted on a directory until `close`. Only root can mount it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        folder.mkdir(parents=True, mode=0o700)
        options = f"size={SIZE},mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, DEVICE, str(folder)]
        done = subprocess.run(command, capture_output=True, check=False)
        self.mounted = done.returncode == 0

    def list_directories(self) -> set[Path]:
        return {path for path in self.folder.iterdir() if path.is_dir()}

    def fill(self) -> None:
        """Write until there is no space left."""
        chunk = CHUNK
        with self._filler.open("wb", buffering=0) as file:
            while chunk:
                try:
                    file.write(chunk)
                except OSError:  # then the rest in smaller pieces
                    chunk = chunk[: len(chunk) // 2]

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        self.free()
        if self.mounted:
            # Lazily: after a failed campaign, killed processes may still have open files there.
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
            self.mounted = False
