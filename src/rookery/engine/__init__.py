"""The engine: schedule, groups, deadlines, retries, breaker, pause; the processes; the library's front.

Promises (each held by a test of the same name in tests/engine):
1. every admitted rollout gets exactly one terminal record;
2. nothing one rollout does cancels another;
3. a group always returns k records, in order, of one shape;
4. every stage has a deadline that the engine enforces and that frees what it held; the run clock excludes pauses
   and the upstream's queue;
5. cancelling reaches sandbox, grader and upstream;
6. the original exception, with its traceback, is in the record and the log;
7. failures above a rate stop admission with a clear message instead of burning the run;
8. kill -9 at any moment, start again: finished rollouts are kept, unfinished ones run again, nothing counts twice,
   nothing is left behind; a second resume of a live run is refused.
"""

from rookery.engine.config import EngineConfig
from rookery.engine.engine import Engine
from rookery.engine.fleet import OwnBug, Stopped
from rookery.engine.remote import RemoteEngine
from rookery.engine.retry import RetryPolicy
from rookery.engine.streams import GroupStream
from rookery.engine.sync import SyncEngine

__all__ = [
    "Engine",
    "EngineConfig",
    "GroupStream",
    "OwnBug",
    "RemoteEngine",
    "RetryPolicy",
    "Stopped",
    "SyncEngine",
]
