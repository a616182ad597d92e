"""Upstream `none`: no model. Used where a run needs no policy, such as grading stored rollouts again."""

from rookery.core import UpstreamError
from rookery.upstreams.protocol import (
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)


class NoUpstream(Upstream):
    """Upstream without a model. Every call fails with the cause `upstream.rejected`."""

    name = "none"
    accepts_tokens = True
    accepts_raw_json = True
    version = 0

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:
        """Take the arguments of every upstream, which this one does not need."""

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:  # noqa: ARG002
        return UpstreamInfo(url="none:", models=("none",))

    async def complete(
        self,
        request: ModelRequest,  # noqa: ARG002
        *,
        timeout: float,  # noqa: ARG002
        on_delta: OnDelta | None = None,  # noqa: ARG002
        on_wait: OnWait | None = None,  # noqa: ARG002
    ) -> ModelReply:
        raise UpstreamError("this run has no policy: it samples nothing", cause="upstream.rejected")
