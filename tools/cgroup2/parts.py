# ruff: noqa: T201  (a program: its output is for people)
"""Fetch an emulator, a kernel and a static shell from the Debian archive that this machine's apt uses.

- Nothing is installed: any user can unpack the packages into a cache directory, and apt's state does not change.
- All packages come through apt, which verifies the archive's signatures.
- Complete parts are not fetched again; partial ones are.
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
"""Modules that the guest needs. Their dependencies are added."""


class PartsError(Exception):
    """A part is not available. The message says which, and what would help."""


class Parts(NamedTuple):
    """Paths of the parts of a guest."""

    qemu: tuple[str, ...]
    """Start of its command line."""
    environ: dict[str, str]
    """Environment variables that it needs."""
    kernel: Path
    modules: tuple[Path, ...]
    """The kernel modules in the order in which they are loaded."""
    busybox: Path
    version: str


class Source(NamedTuple):
    address: str
    suite: str


def fetch_parts(folder: Path, wanted: str) -> Parts:
    """Fetch all parts. `wanted` is a prefix of the kernel's version; empty selects the newest of this release."""
    folder.mkdir(parents=True, exist_ok=True)
    apt = Apt(folder / "apt")
    qemu, busybox = folder / "qemu", folder / "busybox"
    _unpack(apt, qemu, "qemu-system-x86", ["qemu-system-x86"])
    _unpack(apt, busybox, "busybox-static", ["busybox-static"])
    kernel = folder / f"kernel-{wanted or 'own'}"
    if not (kernel / "done").exists():
        _fetch_kernel(apt, kernel, wanted)
    recorded = json.loads((kernel / "done").read_text())
    return Parts(
        _qemu_command(qemu),
        {"QEMU_MODULE_DIR": str(qemu / "usr/lib/x86_64-linux-gnu/qemu")},
        kernel / "vmlinuz",
        tuple(kernel / name for name in recorded["modules"]),
        busybox / "bin/busybox",
        recorded["version"],
    )


class Apt:
    """apt with separate state: its own lists, nothing installed, no system-wide lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._suites: tuple[str, ...] = ()

    def download(self, packages: list[str], *, with_dependencies: bool) -> list[Path]:
        """Download packages and return their files. `with_dependencies` includes what they depend on."""
        archives = self._folder / "cache/archives"
        for old in archives.glob("*.deb"):
            old.unlink()
        if with_dependencies:
            self._run("apt-get", "install", "--download-only", "--yes", "--no-install-recommends", *packages)
        else:
            self._run("apt-get", "download", *packages, cwd=archives)
        return sorted(archives.glob("*.deb"))

    def versions(self, package: str) -> list[tuple[str, str]]:
        """Return the versions of a package, newest first, each with its first dependency."""
        output = self._run("apt-cache", "show", "--all-versions", package, check=False)
        found = re.findall(r"^Version: (\S+)$.*?^Depends: (\S+?)[ ,\n]", output, re.MULTILINE | re.DOTALL)
        return [(version, depends) for version, depends in found]

    def update(self, *more: str) -> None:
        """Read the package lists of this machine's release and of further suites."""
        if self._suites and set(more) <= set(self._suites):
            return
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise PartsError(
                "apt-get and dpkg-deb are not installed, but the guest's parts come from a Debian archive"
            )
        own = _list_sources()
        wanted = [*own, *(Source(own[0].address, suite) for suite in more)]
        for name in ("lists/partial", "cache/archives/partial"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "status").touch()
        text = "".join(f"deb {source.address} {source.suite} main\n" for source in wanted)
        (self._folder / "sources.list").write_text(text)
        print(f"reading package lists: {', '.join(source.suite for source in wanted)}", flush=True)
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
        arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        try:
            done = subprocess.run(
                [command[0], "-q", *arguments, *command[1:]],
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


def _list_sources() -> list[Source]:
    """Return the main archive of this machine's release and its security updates, without third-party archives."""
    release = Path("/etc/os-release")
    known = re.search(r"^VERSION_CODENAME=(\w+)$", release.read_text() if release.exists() else "", re.MULTILINE)
    if known is None:
        raise PartsError("/etc/os-release names no release, so its Debian archive is unknown")
    form = "$(CREATED_BY) $(COMPONENT) $(RELEASE) $(SITE)"
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", form],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout
    found = [line.split() for line in listed.splitlines()]
    sources = [
        Source(fields[3], fields[2])
        for fields in found
        if fields[:2] == ["Packages", "main"] and len(fields) == 4 and fields[2].partition("-")[0] == known[1]
    ]
    sources.sort(key=lambda source: source.suite != known[1])
    if not sources or sources[0].suite != known[1]:
        raise PartsError(f"apt has no archive of {known[1]}; check /etc/apt/sources.list")
    return list(dict.fromkeys(sources))


def _unpack(apt: Apt, target: Path, name: str, packages: list[str]) -> None:
    if (target / "done").exists():
        return
    apt.update()
    print(f"fetching {name}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for package in apt.download(packages, with_dependencies=True):
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)
    (target / "done").touch()


def _qemu_command(top: Path) -> tuple[str, ...]:
    """Return the start of the emulator's command line: its own loader, with the unpacked libraries."""
    libraries = [str(top / name) for name in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")]
    loader = next((path for path in top.glob("lib*/ld-linux-x86-64.so.2")), top / "usr/lib64/ld-linux-x86-64.so.2")
    program = top / "usr/bin/qemu-system-x86_64"
    shares = [word for name in ("qemu", "seabios") for word in ("-L", str(top / "usr/share" / name))]
    return (str(loader), "--library-path", ":".join(libraries), str(program), *shares)


def _fetch_kernel(apt: Apt, target: Path, wanted: str) -> None:
    meta = "linux-image-amd64"
    apt.update()
    found = choose_version(apt.versions(meta), wanted)
    if found is None:  # try the backports of the release
        apt.update(f"{_list_sources()[0].suite}-backports")
        found = choose_version(apt.versions(meta), wanted)
    if found is None:
        raise PartsError(f"the archive has no {meta} {wanted}; it has {[one for one, _ in apt.versions(meta)]}")
    print(f"fetching {found}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (archive,) = apt.download([found], with_dependencies=False)
    _extract(archive, target)
    archive.unlink()


def choose_version(versions: list[tuple[str, str]], wanted: str) -> str | None:
    for version, package in versions:
        if not wanted or version == wanted or version.startswith((f"{wanted}.", f"{wanted}-")):
            return package
    return None


def _extract(archive: Path, target: Path) -> None:
    """Extract the kernel and the modules that a guest needs from a large package."""
    files: dict[str, bytes] = {}
    version = ""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar:
            for member in tar:
                base = member.name.rpartition("/")[2]
                if base.startswith("vmlinuz-"):
                    version = base.removeprefix("vmlinuz-")
                elif not _is_candidate(member.name):
                    continue
                file = tar.extractfile(member)
                if file is not None:
                    files[_module_name(base)] = file.read()
    if not version:
        raise PartsError(f"{archive.name} contains no kernel")
    (target / "vmlinuz").write_bytes(files.pop(_module_name(f"vmlinuz-{version}")))
    plain = {name: _decompress(data) for name, data in files.items()}
    order: list[str] = []
    for module in MODULES:
        append_with_dependencies(module, plain, order)
    if "9p" not in order:
        raise PartsError(f"the kernel {version} has no 9p file system")
    for name in order:
        (target / f"{name}.ko").write_bytes(plain[name])
    (target / "done").write_text(json.dumps({"version": version, "modules": [f"{name}.ko" for name in order]}))


def _is_candidate(path: str) -> bool:
    folders = ("/drivers/virtio/", "/drivers/char/virtio", "/fs/9p/", "/net/9p/", "/fs/netfs/", "/fs/fscache/")
    return ".ko" in path and any(folder in path for folder in (*folders, "/fs/overlayfs/", "/lib/"))


def _module_name(base: str) -> str:
    return base.partition(".ko")[0].replace("-", "_")


def _decompress(data: bytes) -> bytes:
    if data[:6] == b"\xfd7zXZ\x00":
        import lzma

        return lzma.decompress(data)
    return data


def append_with_dependencies(module: str, known: dict[str, bytes], order: list[str]) -> None:
    """Append a module after its dependencies. Unknown modules are built into the kernel."""
    if module in order or module not in known:
        return
    match = re.search(rb"\0depends=([^\0]*)\0", known[module])
    for name in (match[1].decode() if match else "").split(","):
        append_with_dependencies(name.replace("-", "_"), known, order)
    order.append(module)
