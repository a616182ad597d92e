"""All metrics of Rookery, with their names, meanings and labels. `docs/reference/metrics.md` lists them.

Names follow Prometheus: base units (seconds, bytes), and `_total` for counters.
"""

from typing import Final

from rookery.telemetry.metrics import LONG_SECONDS, Counter, Gauge, Histogram, Metric, Registry

REWARDS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0)
"""Negative bounds would make Prometheus leave out the sum, from which the mean reward is computed."""

# ---- engine

ROLLOUTS: Final = Counter("rookery_rollouts_total", "Finished rollouts.", "outcome", "cause")
ROLLOUT_SECONDS: Final = Histogram(
    "rookery_rollout_seconds",
    "Seconds from the start of a rollout's first attempt to the end of its last.",
    bounds=LONG_SECONDS,
)
ROLLOUT_REWARD: Final = Histogram("rookery_rollout_reward", "Rewards of scored rollouts.", bounds=REWARDS)
ATTEMPTS: Final = Counter("rookery_attempts_total", "Ended attempts at rollouts.", "outcome", "cause")
STAGE_SECONDS: Final = Histogram(
    "rookery_attempt_stage_seconds",
    "Seconds of each stage of a rollout's last attempt.",
    "stage",
    bounds=LONG_SECONDS,
)
WAIT_SECONDS: Final = Counter(
    "rookery_attempt_wait_seconds_total",
    "Seconds that the last attempts of rollouts waited for model calls, for sandboxes and for the end of pauses.",
    "resource",
)
IN_FLIGHT: Final = Gauge("rookery_attempts_in_flight", "Attempts that are running.")
GROUPS_READY: Final = Gauge("rookery_groups_ready", "Finished groups that the consumer has not taken.", "stream")
GROUPS: Final = Counter("rookery_groups_total", "Finished groups: `kept`, `filtered` or `surplus`.", "status")
PAUSED: Final = Gauge("rookery_engine_paused", "1 while the run is paused.", merge="max")
POLICY_VERSION: Final = Gauge("rookery_policy_version", "Policy version of the last weight sync.", merge="max")
OUTAGE: Final = Gauge(
    "rookery_upstream_outage_seconds", "Seconds that the run has waited for an inference engine.", merge="max"
)
EVENTS: Final = Counter("rookery_events_total", "Events in the run's journal.", "kind")
RUN_INFO: Final = Gauge(
    "rookery_run_info", "Always 1; the labels describe the run.", "run", "environment", "model"
)

# ---- runner processes

RUNNERS: Final = Gauge("rookery_runners", "Runner processes.", "state")
RUNNER_DEATHS: Final = Counter("rookery_runner_deaths_total", "Runner processes that died.", "death")

LOOP_DELAY: Final = Gauge(
    "rookery_event_loop_delay_seconds",
    "How late the event loop was at its last check; of runners, the largest.",
    "process",
    merge="max",
)

# ---- model calls, in runner processes and gateway shards

MODEL_CALLS: Final = Counter(
    "rookery_model_calls_total", "Ended model calls: `ok`, `truncated`, `cancelled` or a cause.", "role", "result"
)
MODEL_SECONDS: Final = Histogram("rookery_model_call_seconds", "Seconds of successful model calls.", "role")
MODEL_QUEUED: Final = Counter(
    "rookery_model_call_queued_seconds_total",
    "Seconds that model calls waited in the inference engine's queue.",
    "role",
)
PROMPT_TOKENS: Final = Counter("rookery_prompt_tokens_total", "Prompt tokens of model calls.", "role")
SAMPLED_TOKENS: Final = Counter("rookery_sampled_tokens_total", "Sampled tokens of model calls.", "role")

# ---- upstreams

UPSTREAM_UP: Final = Gauge(
    "rookery_upstream_replica_up",
    "1 if every process considers the replica healthy.",
    "role",
    "replica",
    merge="min",
)
UPSTREAM_CALLS: Final = Gauge(
    "rookery_upstream_calls", "Calls that a replica processes or that wait for a slot of it.", "role", "replica"
)
UPSTREAM_LIMIT: Final = Gauge(
    "rookery_upstream_call_slots", "Calls that may be in flight to a replica.", "role", "replica"
)

# ---- sandboxes and pools

SANDBOXES: Final = Gauge("rookery_sandboxes_open", "Open sandboxes of attempts.", "provider")
SANDBOX_REQUESTS: Final = Counter(
    "rookery_sandbox_requests_total",
    "Sandboxes that attempts requested: `ok` or a cause.",
    "provider",
    "result",
)
SANDBOX_SECONDS: Final = Histogram(
    "rookery_sandbox_request_seconds", "Seconds until an attempt had the sandbox that it requested.", "provider"
)
SANDBOX_COMMANDS: Final = Counter(
    "rookery_sandbox_commands_total", "Commands in sandboxes, by how they ended.", "provider", "status"
)
POOL_SANDBOXES: Final = Gauge(
    "rookery_pool_sandboxes", "Sandboxes created in advance: `ready` or `starting`.", "provider", "state"
)
POOL_REQUESTS: Final = Counter(
    "rookery_pool_requests_total",
    "Requests for sandboxes, by whether one was prewarmed (`warm`, `cold`).",
    "provider",
    "result",
)
POOL_UNRESPONSIVE: Final = Counter(
    "rookery_pool_unresponsive_total",
    "Prewarmed sandboxes that did not respond when they were needed.",
    "provider",
)

# ---- tools, agents and graders

TOOL_SECONDS: Final = Histogram("rookery_tool_call_seconds", "Seconds of tool calls.", "tool")
TOOL_CALLS: Final = Counter("rookery_tool_calls_total", "Tool calls: `ok`, `time` or `error`.", "tool", "result")
AGENT_SECONDS: Final = Histogram(
    "rookery_agent_seconds", "Seconds of executions of command-line agents.", "agent", bounds=LONG_SECONDS
)
GRADING_SECONDS: Final = Histogram("rookery_grading_seconds", "Seconds of gradings.", "grader")
GRADINGS: Final = Counter("rookery_gradings_total", "Gradings: `ok` or a cause.", "grader", "result")

# ---- journal

JOURNAL_BACKLOG: Final = Gauge("rookery_journal_backlog", "Writes that are queued and not committed.")
JOURNAL_WRITES: Final = Counter("rookery_journal_writes_total", "Writes that were committed.")
JOURNAL_BYTES: Final = Gauge("rookery_journal_size_bytes", "Size of the journal on disk, without tokens.")

# ---- trainer

TRAIN_STEP: Final = Gauge("rookery_train_step", "Number of finished training steps.", merge="max")
TRAIN_VALUE: Final = Gauge(
    "rookery_train_value",
    "Number in the newest row of metrics.jsonl, such as `reward`, `loss`, `entropy` or `staleness_max`.",
    "name",
    merge="max",
)
TRAIN_SECONDS: Final = Counter(
    "rookery_train_seconds_total",
    "Seconds that training steps spent in a phase: `wait`, `train` or `sync`.",
    "phase",
)
TRAIN_TOKENS: Final = Counter("rookery_train_tokens_total", "Tokens that were trained.")

# ---- gateway

GATEWAY_REQUESTS: Final = Counter("rookery_gateway_requests_total", "HTTP responses.", "shard", "status")
GATEWAY_COUNTS: Final = {
    name: Counter(f"rookery_gateway_{name}_total", help_text, "shard")
    for name, help_text in {
        "turns": "Recorded turns.",
        "prompt_tokens": "Prompt tokens of recorded turns.",
        "sampled_tokens": "Sampled tokens of recorded turns.",
        "replays": "Retries that were answered with the recorded reply.",
        "forks": "Turns that branch off from an earlier point of a conversation.",
        "drifted": "Turns whose prompt does not begin with the token IDs of the turn that they continue.",
        "partial": "Turns whose client closed the stream before the reply was complete.",
        "rerendered": "Turns in tokens mode whose prompt could not extend an earlier turn and was rendered anew.",
        "disconnects": "Clients that disconnected before their response was complete.",
    }.items()
}
GATEWAY_TRUNCATED: Final = Counter(
    "rookery_gateway_truncated_total",
    "Model calls that ended because a budget of the session is exhausted.",
    "shard",
    "reason",
)
GATEWAY_ERRORS: Final = Counter(
    "rookery_gateway_upstream_errors_total", "Model calls that failed at the inference engine.", "shard", "cause"
)
GATEWAY_SESSIONS: Final = Gauge("rookery_gateway_sessions", "Registered sessions that are not deleted.", "shard")
GATEWAY_CALLS: Final = Gauge("rookery_gateway_calls", "Model calls in flight.", "shard")
GATEWAY_CONNECTIONS: Final = Gauge("rookery_gateway_connections", "Open client connections.", "shard")
GATEWAY_PAUSED: Final = Gauge("rookery_gateway_paused", "1 while the policy is paused.", "shard")
GATEWAY_SECONDS: Final = Histogram(
    "rookery_gateway_call_seconds", "Seconds from a request for a model call to its complete response.", "shard"
)
GATEWAY_FIRST_SECONDS: Final = Histogram(
    "rookery_gateway_first_piece_seconds", "Seconds from a request to the first chunk of its stream.", "shard"
)

# ---- serve-code

CODE_PROGRAMS: Final = Counter("rookery_code_programs_total", "Finished programs of serve-code.", "status")
CODE_WAITING: Final = Gauge("rookery_code_programs_waiting", "Programs of serve-code that run or wait.")
CODE_REQUESTS: Final = Counter("rookery_code_requests_total", "HTTP responses of serve-code.", "status")

# ---- serve-embedded

EMBEDDED_SEQUENCES: Final = Gauge(
    "rookery_embedded_sequences", "Sequences of serve-embedded: `running` or `waiting`.", "state"
)
EMBEDDED_TOKENS: Final = Counter("rookery_embedded_tokens_total", "Tokens that serve-embedded sampled.")

REGISTRY: Final = Registry()
"""The metrics of this process."""
REGISTRY.add(one for one in list(globals().values()) if isinstance(one, Metric))
REGISTRY.add(GATEWAY_COUNTS.values())
