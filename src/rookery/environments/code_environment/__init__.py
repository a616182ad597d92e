"""The `code` environment: multi-turn Python with persistent state, graded in fresh sandboxes.

A cell is a piece of Python source that the policy runs. If a cell exceeds a limit, crashes or raises an exception,
the policy is told so and continues. If the interpreter cannot be restarted, the attempt fails as an infrastructure
failure. A task that cannot be scored, or has invalid limits, is rejected before a sandbox is created.
"""

from rookery.environments.code_environment.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]
