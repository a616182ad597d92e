"""The engine schedules rollouts, runs their attempts in runner processes, retries, scores and records them.

`Engine` is the library's entry point. It starts a `Supervisor`, which owns the schedule, the runners and the
journal (the crash-safe record of the run) and executes no user code. Runner processes (`runner.py`) execute the
environment; with `runners=0` the supervisor's process does.

How an attempt is executed:

1. `GroupScheduler` (scheduler.py) chooses the next `OpenRollout` of an open group.
2. The supervisor sends an `AttemptSpec` (runner_protocol.py) to a runner and remembers it as a `Dispatch`
   (runner_handle.py).
3. In the runner, `Executor` starts a `RunningAttempt` (attempt.py). It runs the stages setup, run, score and
   teardown, each with a deadline, and sends an `AttemptResult`.
4. The supervisor appends an `Attempt` (core/records.py) to the rollout. `RetryPolicy` decides on a retry.
   Otherwise `RecordWriter` writes the final `Rollout` record to the journal. A complete group is delivered to the
   consumer after its records are committed.

Guarantees, each proved by a test of the same name in tests/engine:

1. every admitted rollout gets exactly one terminal record;
2. nothing one rollout does cancels another;
3. a group always returns k records, in order, of one shape;
4. every stage has a deadline that the engine enforces and that frees what it held; the run clock excludes pauses
   and the upstream's queue;
5. cancelling reaches sandbox, grader and upstream;
6. the original exception, with its traceback, is in the record and the log;
7. failures above a rate stop admission with a clear message instead of burning the run;
8. after SIGKILL at any moment, a resume keeps finished rollouts, runs the others again, counts nothing twice and
   leaves nothing behind; a second resume of a live run is refused.
"""

from rookery.engine.config import EngineConfig
from rookery.engine.engine import Engine
from rookery.engine.group_stream import GroupStream
from rookery.engine.remote_engine import RemoteEngine
from rookery.engine.retry import RetryPolicy
from rookery.engine.runner_pool import InternalError, Stopped
from rookery.engine.steps import Step, StepStream
from rookery.engine.sync_engine import SyncEngine

__all__ = [
    "Engine",
    "EngineConfig",
    "GroupStream",
    "InternalError",
    "RemoteEngine",
    "RetryPolicy",
    "Step",
    "StepStream",
    "Stopped",
    "SyncEngine",
]
