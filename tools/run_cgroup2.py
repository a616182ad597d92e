# ruff: noqa: T201  (a program: its output is for people)
"""Test the sandboxes' limits on cgroup v2 (`make test-cgroup2`): on this machine if it has v2, else in a guest.

- It needs no root and installs nothing: the parts of a guest are unpacked into the user's cache.
- A guest runs several scenarios: the whole suite as root without enabled controllers; then the tests of limits as
  a service, as a user with a delegated cgroup, and as a user without one. An emulated processor runs only a few
  tests.
- In each scenario, `rookery doctor` must describe the limits correctly, and nothing may be left behind.
- Exit code 0: all passed; 1: something failed; 3: the tests could not run.
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

from cgroup2 import guest, parts  # noqa: E402  (needs the path above)
from peer_cache import cache_entry  # noqa: E402

from rookery.sandbox_runtime import cgroups  # noqa: E402

PASSED, FAILED, NOT_POSSIBLE = 0, 1, 3
FULL_SUITE: Final = (
    "tests/sandboxes",
    *(f"tests/cli/test_cli_{name}.py" for name in ("doctor", "exec", "reap", "run_sandbox")),
)
LIMIT_TESTS: Final = tuple(
    f"tests/sandboxes/{name}" for name in ("test_cgroups.py", "test_conformance.py", "test_probe.py", "hostile")
)
EMULATED_TESTS: Final = (
    "tests/sandboxes/test_cgroups.py",
    *(
        f"tests/sandboxes/test_conformance.py::test_provider_conforms[{name}-local]"
        for name in ("memory_is_limited", "processor_time_is_limited", "a_time_limit_kills_the_whole_tree")
    ),
)
"""Tests that an emulated processor, twenty times slower, finishes in a minute."""
BOMB_TESTS: Final = tuple(
    f"tests/sandboxes/hostile/test_hostile.py::test_destructive_program_is_contained[{name}]"
    for name in ("forks_for_ever", "takes_memory_in_one_process", "takes_memory_in_many_processes")
)
"""Additional tests for scenarios with cgroup limits."""
DOCTOR_AND_TESTS: Final = """
import json, subprocess, sys
wanted, *suite = sys.argv[1:]
output = subprocess.run([sys.executable, "-m", "rookery.cli", "doctor", "--json"], stdout=subprocess.PIPE).stdout
checks = json.loads(output.splitlines()[-1])["checks"]
limits = {check["name"]: check for check in checks if check["name"].startswith("limit: ")}
print("doctor:", *(f"{name} {check['status']}: {check['found']}" for name, check in limits.items()), sep="\\n  ")
true = len(limits) == 3 and all(
    check["status"] == "ok" and check["found"].startswith("cgroup v2 at /sys/fs/cgroup") if wanted == "v2"
    else check["status"] == "weaker" and check["fix"]
    for check in limits.values()
)
if not true:
    print("FAILED: the doctor should report", "cgroup v2" if wanted == "v2" else "weaker")
sys.stdout.flush()
code = subprocess.run([sys.executable, "-m", "pytest", *suite]).returncode
sys.exit(code or not true)
"""


class Scenario(NamedTuple):
    """The user and cgroup that a run starts with, and the tests that it runs."""

    title: str
    limits: str
    suite: tuple[str, ...]


SCENARIOS: Final = {
    "bare": Scenario("root, in the root cgroup, no controller enabled", "v2", FULL_SUITE),
    "service": Scenario("root, in the cgroup of a service, as systemd creates it", "v2", LIMIT_TESTS),
    "delegated": Scenario("a user, in a delegated cgroup", "v2", LIMIT_TESTS),
    "user": Scenario("a user, in the cgroup of a session, without delegated controllers", "none", LIMIT_TESTS),
}


def has_cgroup2() -> bool:
    """Return whether this process can create cgroups with all three controllers of v2."""
    manager = cgroups.find_cgroups()
    manager.close()
    return {cgroups.MEMORY, cgroups.PIDS, cgroups.CPU} <= manager.v2


def build_environment() -> dict[str, str]:
    """Return the environment of a run: paths to the code, and no silently skipped tests."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "TERM") if name in os.environ}
    return {**kept, "ROOKERY_NO_SKIP": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def build_command(scenario: Scenario, args: argparse.Namespace, *, slow: bool = False) -> list[str]:
    tests, options = args.tests or scenario.suite, ["-p", "no:cacheprovider"]
    if slow:
        tests = args.tests or (*EMULATED_TESTS, *(BOMB_TESTS if scenario.limits == "v2" else ()))
        options += ["-vv", "--timeout", "600"]  # shows each test: some take long
    elif args.cores > 1:
        options += ["-n", str(args.cores), "--dist", "loadfile"]
    return [sys.executable, "-c", DOCTOR_AND_TESTS, scenario.limits, *options, *tests]


def run_in_guest(args: argparse.Namespace) -> int:
    if os.uname().machine != "x86_64":
        return report_not_possible("guests are supported on x86_64 only", args)
    fast = guest.has_kvm() and not args.slow
    began = time.monotonic()
    try:
        found = parts.fetch_parts(args.folder, args.kernel)
    except parts.PartsError as error:
        return report_not_possible(str(error), args)
    fetched = time.monotonic() - began
    names = args.scenarios.split(",")
    runs = [
        {
            "name": name,
            "scenario": name,
            "title": SCENARIOS[name].title,
            "command": build_command(SCENARIOS[name], args, slow=not fast),
            "cwd": str(ROOT),
            "env": build_environment(),
        }
        for name in names
    ]
    readable = [ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()]
    request: dict[str, Any] = {"runs": runs, "open": [str(path) for path in readable]}
    if not fast:
        print(f"no KVM ({guest.KVM} and a processor with vmx or svm): emulating, with a few tests only")
    print(f"booting Linux {found.version}: {args.memory} MiB, {args.cores} cores, no network", flush=True)
    try:
        reports = guest.run(
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
    print(f"\nLinux {found.version}, fetched in {fetched:.0f} s, booted in {reports[0]['booted']:.1f} s")
    good = True
    for run in reports[1:-1]:
        passed = run["code"] == 0 and not run["left"]
        good = good and passed
        verdict = "passed" if passed else f"FAILED ({run['code']}; left: {run['left'] or 'nothing'})"
        print(f"  {run['name']:10} {verdict} in {run['seconds']:.0f} s  ({SCENARIOS[run['name']].title})")
    return PASSED if good else FAILED


def report_not_possible(why: str, args: argparse.Namespace) -> int:
    print(f"\nNOT POSSIBLE on cgroup v2: {why}.\n", file=sys.stderr)
    return PASSED if args.if_possible else NOT_POSSIBLE


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the sandboxes' suite on cgroup v2.")
    parser.add_argument(
        "tests", nargs="*", help="run only these tests, in every scenario (pytest's arguments after --)"
    )
    parser.add_argument(
        "--scenarios", default=",".join(SCENARIOS), help="scenarios of a guest (default: %(default)s)"
    )
    parser.add_argument(
        "--kernel", default="", help="prefix of the kernel version, e.g. 6.1 (default: that of this release)"
    )
    parser.add_argument("--guest", action="store_true", help="use a guest even if this machine has v2")
    parser.add_argument("--slow", action="store_true", help="emulate the processor, without KVM")
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 if the tests cannot run")
    parser.add_argument("--memory", type=int, default=4096, help="memory of a guest in MiB (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="processors of a guest (default: %(default)s)")
    parser.add_argument(
        "--deadline", type=float, default=1200, help="time limit of a guest in seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, help="directory for the parts of a guest (default: the user's cache)"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.scenarios.split(",") if name not in SCENARIOS]:
        parser.error(f"unknown scenario: {', '.join(unknown)} (known: {', '.join(SCENARIOS)})")
    if not args.guest and has_cgroup2():
        scenario = Scenario("this machine", "v2", FULL_SUITE)
        done = subprocess.run(
            build_command(scenario, args), cwd=ROOT, env={**os.environ, **build_environment()}, check=False
        )
        return FAILED if done.returncode else PASSED
    if args.folder is not None:
        return run_in_guest(args)
    release = Path("/etc/os-release")
    version = f"{release.read_text() if release.exists() else ''}{platform.machine()}"
    with cache_entry("cgroup2", version) as args.folder:
        return run_in_guest(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
