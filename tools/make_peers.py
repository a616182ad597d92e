# ruff: noqa: T201  (a program: its output is for people)
"""Makes the peers' environments under `.peers/`, for `rookery bench` to measure beside ours (`make peers`).

Promises:
- each peer gets an environment of its own: nothing of it enters ours;
- an environment that is already right is left alone, one that is half made is made again;
- a peer that cannot be made is named, with pip's last words, and the others are still made (exit 1).
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """What to install, the Pythons it runs on, and an import that proves that it works."""

    name: str
    packages: tuple[str, ...]
    python: tuple[tuple[int, int], tuple[int, int]]
    check: str


PEERS = (
    Peer(
        "verifiers",
        ("verifiers==0.4.0", "aiohttp"),
        ((3, 11), (3, 14)),
        "import aiohttp, verifiers.v1, verifiers.v1.clients, verifiers.v1.utils.loaders",
    ),
)


def stamp_of(peer: Peer) -> str:
    """What a finished environment was made from; another text means that it is made again."""
    return "\n".join((*peer.packages, sys.version.split()[0])) + "\n"


def make(peer: Peer, folder: Path) -> str:
    """Makes one environment; returns what went wrong, or nothing."""
    lowest, highest = peer.python
    if not lowest <= sys.version_info[:2] <= highest:
        return (
            f"needs Python {lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}; run this script with one of them"
        )
    target = folder / f"venv-{peer.name}"
    stamp = target / "rookery-peer"
    if stamp.is_file() and stamp.read_text() == stamp_of(peer):
        print(f"{peer.name}: ready in {target}")
        return ""
    print(f"{peer.name}: installing {', '.join(peer.packages)} into {target}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    # From the interpreter under a possible virtual environment: a nested one would break with its host.
    base = Path(getattr(sys, "_base_executable", sys.executable))
    made = subprocess.run([base, "-m", "venv", target], capture_output=True, text=True, check=False)
    if made.returncode:
        return made.stderr.strip() or made.stdout.strip()
    python = target / "bin" / "python"
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *peer.packages,
    ]
    check: list[str | Path] = [python, "-c", peer.check]
    for command in (install, check):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            return ran.stderr.strip()[-2_000:] or f"ended with {ran.returncode}"
    stamp.write_text(stamp_of(peer))
    print(f"{peer.name}: ready in {target}")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environments of the peers.")
    parser.add_argument("peers", nargs="*", help="only these (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent / ".peers")
    args = parser.parse_args()
    known = {peer.name: peer for peer in PEERS}
    if unknown := [name for name in args.peers if name not in known]:
        parser.error(f"no such peer: {', '.join(unknown)} (known: {', '.join(known)})")
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.peers or known:
        if trouble := make(known[name], args.folder):
            failed += 1
            print(f"{name}: not made: {trouble}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
