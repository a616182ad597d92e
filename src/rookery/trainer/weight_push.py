"""Push weights to vLLM and SGLang servers: save them to a directory, and let every server load them from there.

The servers must be able to read the directory: they run on the trainer's machine, or share a file system with it.
"""

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.trainer.errors import TrainingError, write_error

ServerKind: TypeAlias = Literal["vllm", "sglang"]
SECONDS = 1200.0
"""Time limit for a server to load weights. It is shorter than the deadline of the pause around it."""


def check_server(url: str) -> str:
    """Return the root URL of a server, without `/v1`. Raise `UsageError` if it is no HTTP URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"server {url!r:.200} is not a URL such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def save_weights(model: Any, state: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """Save a model and its tokenizer in the format of transformers, with the weights in `state`.

    Raise `TrainingError` if the directory cannot be written. It is complete or absent.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if model.config.tie_word_embeddings:
        state = {name: value for name, value in state.items() if name != "lm_head.weight"}
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model.config.save_pretrained(temporary)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        tensors = {name: value.contiguous().cpu() for name, value in state.items()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise write_error(folder, error) from error


def push_weights(kind: ServerKind, servers: Sequence[str], folder: Path, version: int) -> None:
    """Let every server load the weights in `folder`. Raise `TrainingError` if one of them fails."""
    with ThreadPoolExecutor(len(servers)) as pool:
        for _ in pool.map(lambda server: _load(kind, server, folder, version), servers):
            pass  # raises the error of a server that failed


def _load(kind: ServerKind, server: str, folder: Path, version: int) -> None:
    if kind == "vllm":
        path, hint = "/collective_rpc", "start vLLM with VLLM_SERVER_DEV_MODE=1, which enables this endpoint"
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    else:
        path, hint = "/update_weights_from_disk", "this endpoint is that of SGLang: is it another server?"
        body = {"model_path": str(folder), "weight_version": str(version)}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("ROOKERY_API_KEY") or os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{server}{path}", json.dumps(body).encode(), headers)  # noqa: S310  (checked)
    try:
        with urllib.request.build_opener(_RefuseRedirects).open(request, timeout=SECONDS) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        why = hint if error.code in (404, 405) else error.read(2000).decode(errors="replace")
        raise _push_error(f"{server}{path} answered {error.code}: {why}") from None
    except (OSError, urllib.error.URLError) as error:
        raise _push_error(f"{server} cannot be reached: {describe(error)}") from error


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Raises `HTTPError` for a redirect, so that the API key is sent to no other server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _push_error(why: str) -> TrainingError:
    return TrainingError(f"the weights could not be pushed: {why}", reason="push")
