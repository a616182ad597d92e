"""The `code` environment: multi-turn Python with persistent state, graded in fresh sandboxes.

Limits, crashes and errors of a cell are observations. A worker that cannot be restarted ends the attempt as an
infrastructure failure. A task that cannot be scored, or has invalid limits, is rejected before anything runs.
"""

from rookery.environments.code.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]
