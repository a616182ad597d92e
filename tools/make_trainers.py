# ruff: noqa: T201  (a program: its output is for people)
"""Install other trainers for the tests of the adapters, and run these tests (`make test-trainers`).

Trainers pin versions of transformers, torch or Ray that conflict with each other, so each has a virtual
environment of its own. It goes into the user's cache, by version; a complete entry is reused without a network
call. A trainer that this Python cannot run is reported with the reason and left out. A trainer that could not be
installed is an error (exit 1), after the tests of the others have run.

To add a trainer: add an entry to `TRAINERS`, mark its tests with `pytest.mark.needs(NAME)`, and add the probe NAME
in `tests/conftest.py`. Trainers without conflicts (TRL) are in the project's own environment, and tested by `make
test`.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Final, NamedTuple

from peer_cache import PEERS, cache_entry

ROOT: Final = Path(__file__).resolve().parent.parent
DONE: Final = "complete"
TORCH: Final = "torch==2.13.0"
TESTS: Final = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")


class Trainer(NamedTuple):
    """How to install and test one trainer."""

    requirements: tuple[str, ...]
    """Packages besides Rookery's own dependencies and those of the tests."""
    check: str
    """Python statements that succeed if the trainer is usable."""
    tests: tuple[str, ...]
    """Paths for pytest."""
    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 99))
    """The oldest and the newest supported version of Python."""
    without_dependencies: tuple[str, ...] = ()
    """Packages that are installed with `--no-deps`, because their dependencies need a GPU."""
    sources: tuple[str, ...] = ()
    """Packages whose source distributions are unpacked into `sources`: their tests have sample environments."""
    wheels: tuple[str, ...] = ()
    """Packages that programs of the peer install with uv when they run. uv finds them in `wheels`, offline."""


TRAINERS: Final[dict[str, Trainer]] = {
    "verl": Trainer(
        # The last four are imported by verl without being declared.
        requirements=(
            *(TORCH, "verl==0.9.1", "TransferQueue==0.1.11", "ray==2.60.0", "tokenizers==0.22.2"),
            *("cachetools", "fastapi", "pillow", "uvicorn"),
        ),
        check="import verl.trainer.ppo.v1.agent_loop_tq, transfer_queue",
        tests=("tests/adapters/verl",),
        python=((3, 11), (3, 12)),
    ),
    "verifiers": Trainer(
        requirements=("verifiers==0.4.0", "pyzmq", "uv==0.13.8"),
        check="import verifiers.v1.serve.client",
        tests=("tests/adapters/verifiers",),
        sources=("verifiers==0.4.0",),
        wheels=("openai", "mcp==2.0.0", "httpx", "httpx2", "tenacity", "certifi"),
    ),
    "tinker": Trainer(requirements=("tinker==0.38.0",), check="import tinker", tests=("tests/adapters/tinker",)),
    # Their declared dependencies need a GPU (vLLM, flash-attn). These are the packages that their code for
    # rollouts imports. skyrl declares Python 3.12, but runs on 3.11 with the TypedDict of typing_extensions.
    "openrlhf": Trainer(
        requirements=(
            *(TORCH, "transformers==5.22.0", "datasets==5.2.0", "ray==2.60.0", "pylatexenc==2.10"),
            *("omegaconf", "hydra-core", "httpx", "tenacity", "pillow", "pyarrow"),
            *("aiofiles", "colorlog", "einops", "flask", "lark", "numba", "openai", "torchdata"),
            *("cloudpathlib", "jaxtyping", "loguru", "pybase64", "skyrl-gym==0.4.0"),
        ),
        check="import openrlhf.utils.agent, areal.api.cli_args, skyrl.train.config",
        tests=("tests/adapters/openrlhf", "tests/adapters/areal", "tests/adapters/skyrl"),
        without_dependencies=("--ignore-requires-python", "openrlhf==0.11.2", "areal==1.0.4", "skyrl==0.4.0"),
    ),
    "inspect_ai": Trainer(
        requirements=("inspect-ai==0.3.285", "openai==3.51.0"),
        check="import inspect_ai, openai",
        tests=("tests/adapters/inspect_ai",),
    ),
    # It declares Python 3.13 and packages for all its servers; this one runs on 3.11 with those that it imports.
    "nemo_gym": Trainer(
        requirements=(
            *(
                "ray==2.60.0",
                "anthropic==0.109.2",
                "openai==2.44.0",
                "mcp>=1.28.1,<2",
                "fastapi",
                "uvicorn",
                "itsdangerous",
                "omegaconf",
            ),
            *("hydra-core", "requests", "rich", "devtools", "pandas", "scipy", "wandb", "yappi", "pydot"),
            *("gprof2dot", "tqdm", "psutil", "jinja2"),
        ),
        check="import resources_servers.example_session_state_mgmt.app",
        tests=("tests/adapters/nemo_gym",),
        without_dependencies=("--ignore-requires-python", "nemo-gym==0.7.0"),
    ),
    # TRL is also in the project's own environment, but without openenv its worker for sessions cannot be imported.
    "openenv": Trainer(
        requirements=("openenv==0.10.0", TORCH, "trl==1.16.0", "transformers==5.22.0", "datasets==5.2.0"),
        check="from openenv.core.harness import TrainableSession",
        tests=("tests/adapters/openenv",),
    ),
}


class InstallError(Exception):
    """A trainer cannot be installed; the message says why."""


def install(name: str, trainer: Trainer, peers: Path = PEERS) -> Path:
    """Return the Python of the trainer's virtual environment, which is created once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    others = (*project["dependencies"], *TESTS)
    key = f"{trainer.requirements} {trainer.without_dependencies} {sys.version_info[:2]}"
    if trainer.sources or trainer.wheels:
        key += f" {trainer.sources} {trainer.wheels}"
    with cache_entry(f"venv-{name}", key, peers) as venv:
        python, done = venv / "bin" / "python", venv / DONE
        if done.exists() and done.read_text(encoding="utf-8") == str(others):
            return python
        if not done.exists():
            shutil.rmtree(venv, ignore_errors=True)
            base = getattr(sys, "_base_executable", sys.executable)  # a venv inside a venv breaks with its host
            _run(base, "-m", "venv", str(venv))
        # With a new dependency of Rookery, only that one is installed.
        # Compiling all files takes a minute for each trainer; Python compiles those that it imports.
        pip_install = (str(python), "-m", "pip", "install", "--quiet", "--no-compile")
        _run(*pip_install, *trainer.requirements, *others)
        if trainer.without_dependencies:
            _run(*pip_install, "--no-deps", *trainer.without_dependencies)
        download = (str(python), "-m", "pip", "download", "--quiet")
        if trainer.wheels:
            _run(*download, "--only-binary", ":all:", "--dest", str(venv / "wheels"), *trainer.wheels)
        for source in trainer.sources:
            _run(*download, "--no-deps", "--no-binary", ":all:", "--dest", str(venv / "sources"), source)
        for archive in (venv / "sources").glob("*.tar.gz"):
            shutil.unpack_archive(archive, venv / "sources", filter="data")
            archive.unlink()
        _run(str(python), "-c", trainer.check)
        done.write_text(str(others), encoding="utf-8")
        return python


def test(name: str, trainer: Trainer, python: Path, arguments: list[str]) -> bool:
    """Run the tests of one adapter with the trainer's Python, and return whether they passed."""
    with tempfile.TemporaryDirectory(prefix="rookery-trainers-") as folder:
        # Only the metadata of the installed project: its code is the checkout's, and its plug-ins are found by it.
        metadata = Path(str(distribution("rookery-rl")._path))  # type: ignore[attr-defined]
        shutil.copytree(metadata, Path(folder) / metadata.name)
        environment = os.environ | {
            "PATH": os.pathsep.join((str(python.parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), folder)),
            "UV_CACHE_DIR": str(Path(folder) / "uv"),
            "UV_FIND_LINKS": str(python.parent.parent / "wheels"),
            "UV_NO_INDEX": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        began = time.monotonic()
        command = [str(python), "-m", "pytest", "-q", *trainer.tests, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        print(f"{name}: exit {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
        return done.returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-2_000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Install other trainers, and test the adapters for them.")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(TRAINERS)} (default: all)")
    parser.add_argument("--test", action="store_true", help="also run the tests of the adapters")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="options for pytest, as one argument")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in TRAINERS]:
        parser.error(f"no such trainer: {', '.join(unknown)} (known: {', '.join(TRAINERS)})")
    passed = True
    for name in args.names or TRAINERS:
        trainer = TRAINERS[name]
        oldest, newest = trainer.python
        if not oldest <= sys.version_info[:2] <= newest:
            wanted = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
            print(f"{name}: left out: it needs Python {wanted}, not {sys.version.split()[0]}")
            continue
        print(f"{name}: checking, or installing once", flush=True)
        try:
            python = install(name, trainer)
        except InstallError as error:
            passed = False
            print(f"{name}: not installed: {error}", file=sys.stderr)
            continue
        if args.test:
            passed = test(name, trainer, python, shlex.split(args.pytest)) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
