# ruff: noqa: T201  (a program: its output is for people)
"""Gets a machine emulator, a kernel and a static shell from the archive that this machine's apt knows.

Promises:
- nothing is installed: packages are unpacked in a folder of ours, by any user, and apt's own state stays as it is;
- all that is unpacked came through apt, which checks the archive's signatures;
- what is there already is not fetched again; what is half there is made again.
"""

import getpass
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final, NamedTuple

SECONDS: Final = 600
MODULES: Final = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
"""What a guest needs; with what these depend on."""


class PartsError(Exception):
    """Something cannot be had; the text says what, and what would help."""


class Parts(NamedTuple):
    """Where the parts of a guest lie."""

    qemu: tuple[str, ...]
    """The first words of its command."""
    environ: dict[str, str]
    """What it must see."""
    kernel: Path
    modules: tuple[Path, ...]
    """In the order in which they can be loaded."""
    busybox: Path
    version: str


class Source(NamedTuple):
    address: str
    suite: str


def get(folder: Path, wanted: str) -> Parts:
    """All of them. `wanted` begins the kernel's version; empty is the newest of this machine's release."""
    folder.mkdir(parents=True, exist_ok=True)
    apt = Apt(folder / "apt")
    qemu, busybox = folder / "qemu", folder / "busybox"
    _unpacked(apt, qemu, "qemu-system-x86", ["qemu-system-x86"])
    _unpacked(apt, busybox, "busybox-static", ["busybox-static"])
    kernel = folder / f"kernel-{wanted or 'own'}"
    if not (kernel / "done").exists():
        _kernel(apt, kernel, wanted)
    told = json.loads((kernel / "done").read_text())
    return Parts(
        _qemu(qemu),
        {"QEMU_MODULE_DIR": str(qemu / "usr/lib/x86_64-linux-gnu/qemu")},
        kernel / "vmlinuz",
        tuple(kernel / name for name in told["modules"]),
        busybox / "bin/busybox",
        told["version"],
    )


class Apt:
    """apt with a state of its own: other lists, nothing installed, no lock of the machine's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._suites: tuple[str, ...] = ()

    def download(self, packages: list[str], *, closed: bool) -> list[Path]:
        """The packages' files; `closed`: with everything that they depend on."""
        archives = self._folder / "cache/archives"
        for old in archives.glob("*.deb"):
            old.unlink()
        if closed:
            self._run("apt-get", "install", "--download-only", "--yes", "--no-install-recommends", *packages)
        else:
            self._run("apt-get", "download", *packages, cwd=archives)
        return sorted(archives.glob("*.deb"))

    def versions(self, package: str) -> list[tuple[str, str]]:
        """Of a package, newest first: version, and the package that it depends on first."""
        said = self._run("apt-cache", "show", "--all-versions", package, check=False)
        found = re.findall(r"^Version: (\S+)$.*?^Depends: (\S+?)[ ,\n]", said, re.MULTILINE | re.DOTALL)
        return [(version, depends) for version, depends in found]

    def update(self, *more: str) -> None:
        """Reads the archive's lists: those of this machine's release, and of the further suites."""
        if self._suites and set(more) <= set(self._suites):
            return
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise PartsError("apt-get and dpkg-deb are not here: the guest's parts come from a Debian archive")
        own = _sources()
        wanted = [*own, *(Source(own[0].address, suite) for suite in more)]
        for name in ("lists/partial", "cache/archives/partial"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "status").touch()
        text = "".join(f"deb {source.address} {source.suite} main\n" for source in wanted)
        (self._folder / "sources.list").write_text(text)
        print(f"reading the archive's lists: {', '.join(source.suite for source in wanted)}", flush=True)
        self._run("apt-get", "update")
        self._suites = tuple(source.suite for source in wanted)

    def _run(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        options = {
            "Dir::State::lists": self._folder / "lists",
            "Dir::State::status": self._folder / "status",
            "Dir::State::extended_states": self._folder / "extended",
            "Dir::Cache": self._folder / "cache",
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "APT::Sandbox::User": getpass.getuser(),
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Debug::NoLocking": "true",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        try:
            done = subprocess.run(
                [command[0], "-q", *words, *command[1:]],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PartsError(f"`{' '.join(command)}` took longer than {SECONDS} s") from None
        if check and done.returncode:
            raise PartsError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-1500:]}")
        return done.stdout


def _sources() -> list[Source]:
    """The main archive of this machine's own release, and its security updates; not the archives of others."""
    release = Path("/etc/os-release")
    known = re.search(r"^VERSION_CODENAME=(\w+)$", release.read_text() if release.exists() else "", re.MULTILINE)
    if known is None:
        raise PartsError("/etc/os-release names no release: the guest's parts come from its Debian archive")
    form = "$(CREATED_BY) $(COMPONENT) $(RELEASE) $(SITE)"
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", form], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    found = [line.split() for line in listed.splitlines()]
    sources = [
        Source(words[3], words[2])
        for words in found
        if words[:2] == ["Packages", "main"] and len(words) == 4 and words[2].partition("-")[0] == known[1]
    ]
    sources.sort(key=lambda source: source.suite != known[1])
    if not sources or sources[0].suite != known[1]:
        raise PartsError(f"apt knows no archive of {known[1]}: see /etc/apt/sources.list")
    return list(dict.fromkeys(sources))


def _unpacked(apt: Apt, target: Path, name: str, packages: list[str]) -> None:
    if (target / "done").exists():
        return
    apt.update()
    print(f"fetching {name}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for package in apt.download(packages, closed=True):
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)
    (target / "done").touch()


def _qemu(top: Path) -> tuple[str, ...]:
    """By its own loader: its libraries are unpacked beside it, whatever this machine has."""
    libraries = [str(top / name) for name in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")]
    loader = next((path for path in top.glob("lib*/ld-linux-x86-64.so.2")), top / "usr/lib64/ld-linux-x86-64.so.2")
    program = top / "usr/bin/qemu-system-x86_64"
    shares = [word for name in ("qemu", "seabios") for word in ("-L", str(top / "usr/share" / name))]
    return (str(loader), "--library-path", ":".join(libraries), str(program), *shares)


def _kernel(apt: Apt, target: Path, wanted: str) -> None:
    meta = "linux-image-amd64"
    apt.update()
    found = _chosen(apt.versions(meta), wanted)
    if found is None:  # the next one that the release has had
        apt.update(f"{_sources()[0].suite}-backports")
        found = _chosen(apt.versions(meta), wanted)
    if found is None:
        raise PartsError(f"the archive has no {meta} {wanted}; it has {[one for one, _ in apt.versions(meta)]}")
    print(f"fetching {found}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (archive,) = apt.download([found], closed=False)
    _pick(archive, target)
    archive.unlink()


def _chosen(versions: list[tuple[str, str]], wanted: str) -> str | None:
    for version, package in versions:
        if not wanted or version == wanted or version.startswith((f"{wanted}.", f"{wanted}-")):
            return package
    return None


def _pick(archive: Path, target: Path) -> None:
    """The kernel and the modules that a guest needs, out of some hundred megabytes."""
    files: dict[str, bytes] = {}
    version = ""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar:
            for member in tar:
                base = member.name.rpartition("/")[2]
                if base.startswith("vmlinuz-"):
                    version = base.removeprefix("vmlinuz-")
                elif not _candidate(member.name):
                    continue
                file = tar.extractfile(member)
                if file is not None:
                    files[_name(base)] = file.read()
    if not version:
        raise PartsError(f"{archive.name} holds no kernel")
    (target / "vmlinuz").write_bytes(files.pop(_name(f"vmlinuz-{version}")))
    plain = {name: _plain(data) for name, data in files.items()}
    order: list[str] = []
    for module in MODULES:
        _before(module, plain, order)
    if "9p" not in order:
        raise PartsError(f"the kernel {version} has no 9p file system")
    for name in order:
        (target / f"{name}.ko").write_bytes(plain[name])
    (target / "done").write_text(json.dumps({"version": version, "modules": [f"{name}.ko" for name in order]}))


def _candidate(path: str) -> bool:
    folders = ("/drivers/virtio/", "/drivers/char/virtio", "/fs/9p/", "/net/9p/", "/fs/netfs/", "/fs/fscache/")
    return ".ko" in path and any(folder in path for folder in (*folders, "/fs/overlayfs/", "/lib/"))


def _name(base: str) -> str:
    return base.partition(".ko")[0].replace("-", "_")


def _plain(data: bytes) -> bytes:
    if data[:6] == b"\xfd7zXZ\x00":
        import lzma

        return lzma.decompress(data)
    return data


def _before(module: str, known: dict[str, bytes], order: list[str]) -> None:
    """Appends a module after those that it depends on; what is not known is built into the kernel."""
    if module in order or module not in known:
        return
    said = re.search(rb"\0depends=([^\0]*)\0", known[module])
    for name in (said[1].decode() if said else "").split(","):
        _before(name.replace("-", "_"), known, order)
    order.append(module)
