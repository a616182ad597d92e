"""Read the load of an inference engine from its Prometheus metrics.

It only knows engines that serve many requests concurrently: such an engine hangs if it ignores a short request.
"""

from typing import Final

import msgspec

_RUNNING: Final = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_TOKENS: Final = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
)


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests that an engine runs and queues, and how many tokens it has generated since its start."""

    running: float
    waiting: float = 0.0
    tokens: float | None = None


def parse_engine_load(text: bytes) -> EngineLoad | None:
    """Return the load, summed over the engine's data-parallel ranks; None if the text has no known metric."""
    found: dict[str, float] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        if line.startswith("#"):
            continue
        labelled, _, value = line.strip().rpartition(" ")
        name = labelled.partition("{")[0].strip()
        if name in _RUNNING or name in _WAITING or name in _TOKENS:
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
    running = _first(found, _RUNNING)
    if running is None:
        return None
    return EngineLoad(running, _first(found, _WAITING) or 0.0, _first(found, _TOKENS))


def _first(found: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((found[name] for name in names if name in found), None)
