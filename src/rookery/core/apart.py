"""Where work is begun that outlives who began it.

Promise: in a runner, where a task started by an attempt ends with that attempt, one started in `apart()` does not.
"""

from contextvars import Context


def apart() -> Context:
    """For tasks of what is shared: a health check, an image being fetched, a warm sandbox.

    Without, the first attempt to need it would take it away from all others when it ends. Whoever starts such a
    task keeps it, and ends it with whatever shares it.
    """
    return Context()
