"""The exception of `rookery.training`."""

from rookery.core import RookeryError


class BatchError(RookeryError):
    """A rollout or batch cannot be trained on.

    The exception's `code` names the cause; the default is `bug.batch`.
    """

    cause = "bug.batch"
