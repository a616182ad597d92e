"""Traces for OpenTelemetry: spans of rollouts, stages, model calls, tool calls and gradings.

Runs in all processes of a run. The supervisor starts a span for each rollout and passes its context to runner
processes with each attempt. The spans of stages are its children; the spans of operations are children of stages.
Model calls and tool calls have attributes of the semantic conventions for generative AI (`gen_ai.*`). Other
attributes begin with `rookery.`.

- Without tracing, `active` is None and nothing of OpenTelemetry is imported.
- Prompts, replies, and arguments and results of tools are sent only if the user asks for content.
- A thread sends spans in batches. If the endpoint cannot be reached, spans are dropped and the run continues.
- A client of the gateway cannot attach its spans to the trace of another session.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

import rookery
from rookery.core import Message, Sampling, Turn, UsageError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind

INSTALL: Final = "traces need OpenTelemetry: pip install 'rookery-rl[otel]'"
MAX_CONTENT: Final = 64 << 10
"""Maximum number of characters of an attribute with content. More are cut off."""
FLUSH_SECONDS: Final = 5.0
"""How long a process waits at its end for an endpoint that does not respond."""
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of traces: their receiver and their content."""

    endpoint: str
    """Base URL of an OTLP/HTTP receiver, such as `http://localhost:4318`, or the complete URL ending in
    `/v1/traces`."""
    content: bool = False
    """True if spans contain prompts, replies, and arguments and results of tools."""

    def check(self) -> None:
        """Raise `UsageError` if the endpoint is not a URL, or if the packages of the extra `otel` are missing."""
        if not re.match(r"https?://[^/\s]+", self.endpoint):
            raise UsageError(
                f"the endpoint of traces must be a URL such as http://localhost:4318, not {self.endpoint!r:.100}"
            )
        try:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError:
            raise UsageError(INSTALL) from None

    @property
    def url(self) -> str:
        return self.endpoint if self.endpoint.endswith("/v1/traces") else f"{self.endpoint.rstrip('/')}/v1/traces"


class Tracing:
    """Creates spans and sends them to the endpoint of `settings`."""

    def __init__(self, settings: TraceSettings, run: str, process: str) -> None:
        settings.check()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create(
            {
                "service.name": "rookery",
                "service.version": rookery.__version__,
                "rookery.run": run,
                "rookery.process": process,
            }
        )
        self.settings = settings
        self.users = 1
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(settings.url)))
        self._tracer = self._provider.get_tracer("rookery", rookery.__version__)

    def start(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        parent: str = "",
        kind: "SpanKind | None" = None,
    ) -> "Span":
        """Start a span. Its parent is the traceparent `parent`, or the current span if that is empty."""
        from opentelemetry.trace import SpanKind

        context = read_traceparent(parent) if parent else None
        return self._tracer.start_span(
            name,
            context,
            kind if kind is not None else SpanKind.INTERNAL,
            {key: value for key, value in attributes.items() if value is not None},
        )

    def close(self) -> None:
        """Send the remaining spans. Blocks for up to `FLUSH_SECONDS` if the endpoint does not respond."""
        # The SDK itself waits for up to 30 seconds.
        sender = threading.Thread(target=self._provider.shutdown, name="rookery-traces", daemon=True)
        sender.start()
        sender.join(FLUSH_SECONDS)


active: Tracing | None = None
"""The tracing of this process, or None if it sends no traces."""


def start_tracing(settings: TraceSettings, run: str, process: str) -> None:
    """Send traces of this process from now on. Raises `UsageError` if it already sends them elsewhere."""
    global active  # noqa: PLW0603  (OpenTelemetry's context is global to the process too)
    if active is None:
        active = Tracing(settings, run, process)
    elif active.settings != settings:
        raise UsageError(f"this process already sends traces to {active.settings.endpoint}; use the same settings")
    else:
        active.users += 1


def stop_tracing() -> None:
    """Undo one `start_tracing`. The last call sends the remaining spans, and may block for seconds."""
    global active
    if active is None:
        return
    active.users -= 1
    if active.users == 0:
        ended, active = active, None
        ended.close()


# ---- context


def read_traceparent(text: str) -> "Context":
    """Return OpenTelemetry's context for a W3C traceparent. An invalid one gives an empty context."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": text}, Context())


def write_traceparent(span: "Span | None" = None) -> str:
    """Return the W3C traceparent of a span, by default of the current one; empty if there is none."""
    from opentelemetry.trace import get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span or get_current_span()))
    return carrier.get("traceparent", "")


def is_traceparent(text: str) -> bool:
    return _TRACEPARENT.fullmatch(text) is not None


def choose_parent(registered: str, header: str) -> str:
    """Return the parent of a gateway call: the client's `traceparent` header, or the one of its session.

    If the session has a trace, a header of another trace is ignored.
    """
    sent, own = _TRACEPARENT.fullmatch(header.strip()), _TRACEPARENT.fullmatch(registered)
    if sent is None or (own is not None and own[1] != sent[1]):
        return registered
    return header.strip()


@contextmanager
def parent_context(traceparent: str) -> Iterator[None]:
    """Make `traceparent` the parent of spans that are started inside the block."""
    from opentelemetry.context import attach, detach

    token = attach(read_traceparent(traceparent))
    try:
        yield
    finally:
        detach(token)


class CurrentSpan:
    """A started span that is the parent of other spans until `end` is called, in the same asyncio task."""

    def __init__(self, span: "Span") -> None:
        from opentelemetry.context import attach
        from opentelemetry.trace import set_span_in_context

        self.span = span
        self._token = attach(set_span_in_context(span))

    def end(self, error_type: str = "", detail: str = "") -> None:
        """End the span, as failed if `error_type` is not empty."""
        from opentelemetry.context import detach

        detach(self._token)
        end_span(self.span, error_type, detail)


def end_span(span: "Span", error_type: str = "", detail: str = "") -> None:
    """End a span, as failed if `error_type` is not empty. An exhausted budget (`truncated`) is not a failure."""
    from opentelemetry.trace import Status, StatusCode

    if error_type == "truncated":
        span.set_attribute("rookery.truncated", value=True)
    elif error_type:
        span.set_attribute("error.type", error_type)
        span.set_status(Status(StatusCode.ERROR, detail[:1000] or None))
    span.end()


# ---- attributes


def chat_attributes(role: str, model: str, provider: str, attempt: str, sampling: Sampling) -> dict[str, Any]:
    """Return the attributes of a model call that are known before it starts."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.conversation.id": attempt.rpartition(".")[0] or attempt,
        "rookery.attempt": attempt,
        "rookery.role": role,
    }


def turn_attributes(turn: Turn) -> dict[str, Any]:
    """Return the attributes of a model call that its recorded turn adds."""
    return {
        "gen_ai.response.finish_reasons": (turn.finish,),
        "gen_ai.usage.input_tokens": turn.prompt_tokens,
        "gen_ai.usage.output_tokens": turn.sampled_tokens,
        "rookery.turn": turn.index,
        "rookery.policy.version": turn.version,
        "rookery.queue_seconds": turn.queued,
        "server.address": turn.upstream,
    }


def encode_messages(messages: tuple[Message, ...]) -> str:
    """Return messages as JSON in the format of `gen_ai.input.messages`, of bounded length."""
    plain = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        if message.reasoning:
            parts.append({"type": "reasoning", "content": message.reasoning})
        if message.content is not None:
            plain_content = msgspec.to_builtins(message.content)
            text = plain_content if isinstance(plain_content, str) else msgspec.json.encode(plain_content).decode()
            kind = "tool_call_response" if message.role == "tool" else "text"
            key = "response" if message.role == "tool" else "content"
            parts.append({"type": kind, key: text})
        parts += [
            {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
        plain.append({"role": message.role, "parts": parts})
    return msgspec.json.encode(plain).decode()[:MAX_CONTENT]
