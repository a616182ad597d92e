# ruff: noqa: T201  (a program: its output is for people)
"""Install other systems below `.peers/`, for tests and for the benchmarks (`make peers`).

Behaviour:
- each peer has its own virtual environment, separate from ours;
- nothing is installed on the machine: Debian packages are downloaded and unpacked into the user's cache, and an
  engine that is needed to build an image is stopped afterwards;
- a complete environment is reused, an incomplete one is made again;
- a peer that cannot be installed is reported with the end of pip's output, and the others are still installed.
"""

import argparse
import asyncio
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from peer_cache import PEERS as FOLDER
from peer_cache import cache_entry


class Peer(NamedTuple):
    """A system to install: its packages, supported Python versions, and an import that proves that it works."""

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
    Peer(
        "bare-proxy",
        (
            "uvicorn==0.54.0",
            "starlette==1.10.0",
            "aiohttp==3.14.5",
            "httptools==0.9.0",
            "orjson==3.13.0",
            "uvloop==0.23.0",
        ),
        ((3, 11), (3, 14)),
        "import aiohttp, httptools, orjson, starlette, uvicorn, uvloop",
    ),
    Peer(
        "ipykernel",
        ("ipykernel==7.1.0", "jupyter_client==8.6.3"),
        ((3, 11), (3, 14)),
        "import ipykernel, jupyter_client",
    ),
    Peer(
        "litellm",
        ("litellm[proxy]==1.106.2",),
        ((3, 11), (3, 13)),
        "from litellm import run_server; import litellm.proxy.proxy_server",
    ),
    Peer("wandb", ("wandb==0.31.0", "msgspec==0.22.0"), ((3, 11), (3, 14)), "import msgspec, wandb"),
)


def get_stamp(peer: Peer) -> str:
    """Return the versions that an environment is made from; if they differ, it is made again."""
    return "\n".join((*peer.packages, sys.version.split()[0])) + "\n"


def make_peer(peer: Peer, folder: Path) -> str:
    """Install one peer. Returns an error message, or the empty string."""
    lowest, highest = peer.python
    if not lowest <= sys.version_info[:2] <= highest:
        return (
            f"needs Python {lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}; run this script with one of them"
        )
    with cache_entry(f"venv-{peer.name}", get_stamp(peer), folder) as target:
        return _install(peer, target)


def _install(peer: Peer, target: Path) -> str:
    stamp = target / "rookery-peer"
    if stamp.is_file() and stamp.read_text() == get_stamp(peer):
        print(f"{peer.name}: ready in {target}")
        return ""
    print(f"{peer.name}: installing {', '.join(peer.packages)} into {target}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    # The base interpreter, because a nested virtual environment would break with its parent.
    base = Path(getattr(sys, "_base_executable", sys.executable))
    process = subprocess.run([base, "-m", "venv", target], capture_output=True, text=True, check=False)
    if process.returncode:
        return process.stderr.strip() or process.stdout.strip()
    python = target / "bin" / "python"
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        *peer.packages,
    ]
    check: list[str | Path] = [python, "-c", peer.check]
    for command in (install, check):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            return process.stderr.strip()[-2_000:] or f"exited with {process.returncode}"
    stamp.write_text(get_stamp(peer))
    print(f"{peer.name}: ready in {target}")
    return ""


# ------------------------------------------------------------------------- bwrap, and a private Docker engine

SANDBOXES, ENGINE, PODMAN, SSH, CHROMIUM = "sandboxes", "engine", "podman", "ssh", "chromium"
PROMETHEUS, KUBECTL, UMOCI = "prometheus", "kubectl", "umoci"
KUBECTL_RELEASE = "trixie"
"""The first Debian release whose kubectl runs programs in pods over WebSockets."""
DEBS = ("bubblewrap", "docker.io", "mmdebstrap")
PROGRAMS = ("usr/sbin/dockerd", "usr/bin/bwrap", "usr/bin/mmdebstrap")
PODMAN_DEBS = ("podman", "conmon", "crun", "netavark")
PODMAN_PROGRAMS = ("usr/bin/podman", "usr/bin/conmon", "usr/bin/crun")
SSH_DEBS = ("openssh-server", "openssh-client", "openssh-sftp-server")
CHROMIUM_DEBS = ("chromium", "fonts-dejavu-core", "fontconfig-config")
IN_IMAGE = "python3"


def make_ssh(folder: Path) -> str:
    """Unpack OpenSSH for tests that start their own server. Returns an error message, or the empty string."""
    return _make_programs(folder, SSH, SSH_DEBS, ("usr/sbin/sshd", "usr/bin/ssh", "usr/bin/ssh-keygen"))


def make_chromium(folder: Path) -> str:
    """Unpack Chromium for the tests of the viewer. Returns an error message, or the empty string."""
    return _make_programs(folder, CHROMIUM, CHROMIUM_DEBS, ("usr/lib/chromium/chromium",))


def make_prometheus(folder: Path) -> str:
    """Unpack Prometheus for tests that start their own server. Returns an error message, or the empty string."""
    return _make_programs(folder, PROMETHEUS, (PROMETHEUS,), ("usr/bin/prometheus",))


def make_umoci(folder: Path) -> str:
    """Unpack umoci, a peer of the benchmark `docker`. Returns an error message, or the empty string."""
    return _make_programs(folder, UMOCI, (UMOCI,), ("usr/bin/umoci",))


def make_kubectl(folder: Path) -> str:
    """Unpack kubectl for tests that compare it with our client. Returns an error message, or the empty string."""
    with cache_entry(KUBECTL, f"{KUBECTL} {KUBECTL_RELEASE} {platform.machine()}", folder) as target:
        program = "usr/bin/kubectl"
        if not os.access(target / "root" / program, os.X_OK):
            options, error = _use_release(target / "apt", KUBECTL_RELEASE)
            error = error or _unpack_packages(target, (KUBECTL,), (program,), options)
            shutil.rmtree(target / "apt", ignore_errors=True)
            if error:
                return error
        print(f"{KUBECTL}: ready in {target}")
        return ""


def _use_release(folder: Path, release: str) -> tuple[list[str], str]:
    """Return options with which apt uses another release of Debian, from this machine's mirror, and an error."""
    if shutil.which("apt-get") is None:
        return [], "needs Debian's apt-get"
    find = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    sites = subprocess.run(find, capture_output=True, text=True, check=False).stdout.split()
    if not sites:
        if error := _run_all([["apt-get", "-q", "update"]]):
            return [], error
        sites = subprocess.run(find, capture_output=True, text=True, check=False).stdout.split()
    if not sites:
        return [], "needs a machine with the packages of Debian"
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    fields = {"Types": "deb", "URIs": sites[0], "Suites": release, "Components": "main", "Signed-By": keys}
    (folder / "release.sources").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    options = {
        "Dir::Etc::sourcelist": str(folder / "release.sources"),
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": str(folder / "lists"),
        "Dir::State::status": "/dev/null",  # as if no package were installed
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")], ""


def make_engine(folder: Path) -> str:
    """Unpack Docker, without an image, for tests that start their own engine. Returns an error message, or ""."""
    return _make_programs(folder, SANDBOXES, DEBS, PROGRAMS)


def make_podman(folder: Path) -> str:
    """Unpack podman for tests that start their own service. Returns an error message, or the empty string."""
    return _make_programs(folder, PODMAN, PODMAN_DEBS, PODMAN_PROGRAMS)


def _make_programs(folder: Path, name: str, packages: tuple[str, ...], programs: tuple[str, ...]) -> str:
    with cache_entry(name, _release(packages), folder) as target:
        if error := _unpack_packages(target, packages, programs):
            return error
        print(f"{name}: ready in {target}")
        return ""


def _release(packages: tuple[str, ...]) -> str:
    """Return the packages and the Debian release they come from: a newer release is another version."""
    return "\n".join((*packages, _debian_release(), platform.machine()))


def _unpack_packages(
    target: Path, packages: tuple[str, ...], programs: tuple[str, ...], options: Sequence[str] = ()
) -> str:
    """Unpack Debian packages below `target` unless their programs are there. Returns an error message, or "".

    `options` are those of apt, for example for another release.
    """
    root, staging, debs = target / "root", target / "half", target / "debs"
    if all(os.access(root / name, os.X_OK) for name in programs):
        return ""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "needs Debian's apt-get and dpkg-deb"
    print(f"unpacking {', '.join(packages)} into {root}", flush=True)
    for directory in (root, staging, debs):
        shutil.rmtree(directory, ignore_errors=True)
    staging.mkdir(parents=True)
    (debs / "partial").mkdir(parents=True)
    fetch = ["apt-get", "-q", "-y", "--download-only", "--reinstall", "--no-install-recommends"]
    apt_options = ["-o", f"Dir::Cache::archives={debs}", "-o", "Debug::NoLocking=1", *options]
    if error := _run_all([[*fetch, *apt_options, "install", *packages]]):
        # A new machine may not have downloaded the package lists yet.
        if "Unable to locate" not in error and "Failed to fetch" not in error:
            return error
        update = ["apt-get", "-q", "update", *options]
        if error := _run_all([update, [*fetch, *apt_options, "install", *packages]]):
            return error
    if error := _run_all([["dpkg-deb", "-x", deb, staging] for deb in sorted(debs.glob("*.deb"))]):
        return error
    shutil.rmtree(debs)
    for path in staging.rglob("*"):  # no set-user-ID programs in the cache
        if not path.is_symlink() and path.stat().st_mode & 0o6000:
            path.chmod(path.stat().st_mode & 0o777)
    staging.rename(root)
    return ""


def make_sandboxes(folder: Path) -> str:
    """Unpack bwrap and Docker and import an image with Python. Returns an error message, or the empty string."""
    with cache_entry(SANDBOXES, _release(DEBS), folder) as target:
        return _make_image(target)


def _make_image(target: Path) -> str:
    stamp = target / "rookery-peer"
    wanted = "\n".join((*DEBS, IN_IMAGE)) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{SANDBOXES}: ready in {target}")
        return ""
    root = target / "root"
    shutil.rmtree(target / "data", ignore_errors=True)
    if error := _unpack_packages(target, DEBS, PROGRAMS):
        return error
    if error := _run_all([[root / "usr/bin/bwrap", "--version"]]):
        return error
    if os.geteuid() != 0:
        print(f"{SANDBOXES}: bwrap is ready; a private Docker engine needs root", file=sys.stderr)
    elif error := _import_image(target, root):
        return f"bwrap is ready, Docker is not: {error}"
    stamp.write_text(wanted)
    print(f"{SANDBOXES}: ready in {target}")
    return ""


def _import_image(target: Path, root: Path) -> str:
    """Import an image of Debian packages into the engine, without a registry. Returns an error message, or ""."""
    sys.path.insert(0, str(FOLDER.parent))
    from benchmarks.docker_engine import IMAGE, private_engine

    tar = target / "base.tar"
    command: list[str | Path] = [root / "usr/bin/mmdebstrap", "--variant=apt", f"--include={IN_IMAGE}"]
    print(f"{SANDBOXES}: creating an image with {IN_IMAGE}, which takes a minute", flush=True)
    if error := _run_all([[*command, _debian_release(), tar]]):
        return error

    async def import_image() -> str:
        async with private_engine(target) as socket:
            command: list[str | Path] = [root / "usr/bin/docker", "-H", f"unix://{socket}", "import", tar, IMAGE]
            return await asyncio.to_thread(_run_all, [command])

    try:
        return asyncio.run(import_image())
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        tar.unlink(missing_ok=True)


def _debian_release() -> str:
    """Return the codename of this machine's Debian release."""
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    return "stable"


def _run_all(commands: list[list[str | Path]]) -> str:
    for command in commands:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            output = process.stderr.strip() or process.stdout.strip()
            return output[-2_000:] or f"{command[0]} exited with {process.returncode}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Install other systems for tests and benchmarks.")
    parser.add_argument("peers", nargs="*", help="names of peers (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    known: dict[str, Callable[[Path], str]] = {peer.name: partial(make_peer, peer) for peer in PEERS}
    known[CHROMIUM] = make_chromium
    known[ENGINE] = make_engine
    known[PODMAN] = make_podman
    known[SANDBOXES] = make_sandboxes
    known[SSH] = make_ssh
    known[PROMETHEUS] = make_prometheus
    known[UMOCI] = make_umoci
    known[KUBECTL] = make_kubectl
    if unknown := [name for name in args.peers if name not in known]:
        parser.error(f"no such peer: {', '.join(unknown)} (known: {', '.join(known)})")
    failed = 0
    for name in args.peers or known:
        if error := known[name](args.folder):
            failed += 1
            print(f"{name}: not installed: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
