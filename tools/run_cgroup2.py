# ruff: noqa: T201  (a program: its output is for people)
"""Test the sandboxes' limits on cgroup v2 (`make test-cgroup2`): on this machine if it has v2, else in a guest.

Promises:
- it needs no root and installs nothing: a guest's parts are unpacked into the user's cache;
- in a guest the suite runs as root where nobody enabled a controller; then, the part that needs controllers, as a
  service, as a user with a group of its own, and as a user without one; where the processor must be emulated, only
  the tests of the limits run, in the same places;
- in each place `rookery doctor` must tell the truth about the limits, and nothing may be left behind;
- it exits with 0 when all of that held, 1 when something did not, 3 when it could not be tried.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from cgroup2 import guest, parts  # noqa: E402  (after the path to them)
from peer_cache import cache_entry  # noqa: E402

from rookery.sandbox_runtime import cgroups  # noqa: E402

PASSED, FAILED, NOT_TRIED = 0, 1, 3
WHOLE: Final = (
    "tests/sandboxes",
    *(f"tests/cli/test_cli_{name}.py" for name in ("doctor", "exec", "reap", "run_sandbox")),
)
LIMITS: Final = tuple(
    f"tests/sandboxes/{name}" for name in ("test_cgroups.py", "test_conformance.py", "test_probe.py", "hostile")
)
EMULATED: Final = (
    "tests/sandboxes/test_cgroups.py",
    *(
        f"tests/sandboxes/test_conformance.py::test_provider_conforms[{name}-local]"
        for name in ("memory_is_limited", "processor_time_is_limited", "a_time_limit_kills_the_whole_tree")
    ),
)
"""What a processor that is emulated, twenty times slower, gets to the end of in a minute."""
BOMBS: Final = tuple(
    f"tests/sandboxes/hostile/test_hostile.py::test_destructive_program_is_contained[{name}]"
    for name in ("forks_for_ever", "takes_memory_in_one_process", "takes_memory_in_many_processes")
)
"""With it, where limits are held for a box together."""
DOCTOR: Final = """
import json, subprocess, sys
wanted, *suite = sys.argv[1:]
told = subprocess.run([sys.executable, "-m", "rookery.cli", "doctor", "--json"], stdout=subprocess.PIPE).stdout
checks = json.loads(told.splitlines()[-1])["checks"]
limits = {check["name"]: check for check in checks if check["name"].startswith("limit: ")}
print("doctor:", *(f"{name} {check['status']}: {check['found']}" for name, check in limits.items()), sep="\\n  ")
true = len(limits) == 3 and all(
    check["status"] == "ok" and check["found"].startswith("cgroup v2 at /sys/fs/cgroup") if wanted == "v2"
    else check["status"] == "weaker" and check["fix"]
    for check in limits.values()
)
if not true:
    print("FAILED: the doctor should have said", "cgroup v2" if wanted == "v2" else "weaker")
sys.stdout.flush()
code = subprocess.run([sys.executable, "-m", "pytest", *suite]).returncode
sys.exit(code or not true)
"""


class Place(NamedTuple):
    """Where a run begins: which user, in which control group."""

    title: str
    limits: str
    suite: tuple[str, ...]


PLACES: Final = {
    "bare": Place("root, in the root group, no controller enabled", "v2", WHOLE),
    "service": Place("root, in a service's group, as systemd makes it", "v2", LIMITS),
    "delegated": Place("a user, in a group that is the user's own", "v2", LIMITS),
    "user": Place("a user, in a session's group: no limit can be held together", "none", LIMITS),
}


def on_this_machine() -> bool:
    """Whether groups that we may make here have all three controllers of v2."""
    manager = cgroups.find_cgroups()
    manager.close()
    return {cgroups.MEMORY, cgroups.PIDS, cgroups.CPU} <= manager.v2


def environ() -> dict[str, str]:
    """What a run sees of ours: the way to the code, and that no test may be skipped in silence."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "TERM") if name in os.environ}
    return {**kept, "ROOKERY_NO_SKIP": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def command(place: Place, args: argparse.Namespace, *, slow: bool = False) -> list[str]:
    tests, options = args.tests or place.suite, ["-p", "no:cacheprovider"]
    if slow:
        tests = args.tests or (*EMULATED, *(BOMBS if place.limits == "v2" else ()))
        options += ["-vv", "--timeout", "600"]  # by name: a test may take a while
    elif args.cores > 1:
        options += ["-n", str(args.cores), "--dist", "loadfile"]
    return [sys.executable, "-c", DOCTOR, place.limits, *options, *tests]


def in_a_guest(args: argparse.Namespace) -> int:
    if os.uname().machine != "x86_64":
        return not_tried("a guest is booted on x86_64 only", args)
    fast = guest.has_kvm() and not args.slow
    began = time.monotonic()
    try:
        found = parts.get(args.folder, args.kernel)
    except parts.PartsError as error:
        return not_tried(str(error), args)
    fetched = time.monotonic() - began
    names = args.places.split(",")
    runs = [
        {
            "name": name,
            "place": name,
            "title": PLACES[name].title,
            "command": command(PLACES[name], args, slow=not fast),
            "cwd": str(ROOT),
            "env": environ(),
        }
        for name in names
    ]
    readable = [ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()]
    request: dict[str, Any] = {"runs": runs, "open": [str(path) for path in readable]}
    if not fast:
        print(f"no KVM ({guest.KVM}, and a processor with vmx or svm): emulated, and only the tests of the limits")
    print(f"booting Linux {found.version}: {args.memory} MiB, {args.cores} cores, no network", flush=True)
    try:
        told = guest.run(
            found,
            request,
            memory_mb=args.memory,
            cores=args.cores,
            seconds=args.deadline,
            fast=fast,
        )
    except guest.GuestError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return FAILED
    print(f"\nLinux {found.version}, fetched in {fetched:.0f} s, booted in {told[0]['booted']:.1f} s")
    good = True
    for run in told[1:-1]:
        passed = run["code"] == 0 and not run["left"]
        good = good and passed
        said = "passed" if passed else f"FAILED ({run['code']}; left: {run['left'] or 'nothing'})"
        print(f"  {run['name']:10} {said} in {run['seconds']:.0f} s  ({PLACES[run['name']].title})")
    return PASSED if good else FAILED


def not_tried(why: str, args: argparse.Namespace) -> int:
    print(f"\nNOT TRIED on cgroup v2: {why}.\n", file=sys.stderr)
    return PASSED if args.if_possible else NOT_TRIED


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the sandboxes' suite on cgroup v2.")
    parser.add_argument("tests", nargs="*", help="only these, in every place (pytest's arguments after --)")
    parser.add_argument("--places", default=",".join(PLACES), help="of a guest (default: %(default)s)")
    parser.add_argument(
        "--kernel", default="", help="begin of its version, e.g. 6.1 (default: this release's own)"
    )
    parser.add_argument("--guest", action="store_true", help="in a guest, also where this machine has v2")
    parser.add_argument("--slow", action="store_true", help="without KVM: an emulated processor")
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 where it cannot be tried")
    parser.add_argument("--memory", type=int, default=4096, help="of a guest, in MiB (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="of a guest (default: %(default)s)")
    parser.add_argument(
        "--deadline", type=float, default=1200, help="of a guest, in seconds (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="for a guest's parts (default: the user's cache)")
    args = parser.parse_args()
    if unknown := [name for name in args.places.split(",") if name not in PLACES]:
        parser.error(f"no such place: {', '.join(unknown)} (known: {', '.join(PLACES)})")
    if not args.guest and on_this_machine():
        place = Place("this machine", "v2", WHOLE)
        done = subprocess.run(command(place, args), cwd=ROOT, env={**os.environ, **environ()}, check=False)
        return FAILED if done.returncode else PASSED
    if args.folder is not None:
        return in_a_guest(args)
    release = Path("/etc/os-release")
    version = f"{release.read_text() if release.exists() else ''}{platform.machine()}"
    with cache_entry("cgroup2", version) as args.folder:
        return in_a_guest(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
