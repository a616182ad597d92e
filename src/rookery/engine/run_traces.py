"""The spans of rollouts. Runs in the supervisor's process; the spans of stages are created in runner processes."""

from typing import TYPE_CHECKING

from rookery.core import Failed, Rollout
from rookery.core.outcomes import label
from rookery.engine.scheduler import OpenRollout
from rookery.telemetry import tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RolloutTraces:
    """Starts a span when the first attempt at a rollout starts, and ends it with the rollout's final record."""

    def __init__(self, run: str, environment: str) -> None:
        self._run = run
        self._environment = environment
        self._spans: dict[str, Span] = {}

    def start(self, rollout: OpenRollout) -> str:
        """Return the traceparent of a rollout's span. The first call starts it."""
        span = self._spans.get(rollout.id)
        if span is None:
            if tracing.active is None:
                return ""
            span = self._spans[rollout.id] = tracing.active.start(
                f"rollout {self._environment}",
                {
                    "gen_ai.conversation.id": rollout.id,
                    "rookery.run": self._run,
                    "rookery.environment": self._environment,
                    "rookery.rollout": rollout.id,
                    "rookery.group": rollout.group.index,
                    "rookery.task": rollout.group.task.id,
                },
            )
        return tracing.write_traceparent(span)

    def end(self, record: Rollout) -> None:
        """End the span of a finished rollout."""
        span = self._spans.pop(record.id, None)
        if span is None:
            return
        outcome = record.outcome
        span.set_attributes({"rookery.outcome": label(outcome), "rookery.attempts": len(record.attempts)})
        if record.reward is not None:
            reward = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": record.reward}
            span.add_event("gen_ai.evaluation.result", reward)
        if isinstance(outcome, Failed):
            tracing.end_span(span, outcome.cause, outcome.detail)
        else:
            span.end()

    def close(self) -> None:
        """End the spans of rollouts that did not finish."""
        for span in self._spans.values():
            tracing.end_span(span, "cancelled.shutdown")
        self._spans.clear()
