"""The exception of `rookery.training`."""

from rookery.core import RookeryError


class BatchError(RookeryError):
    """Data cannot be trained on. Its code names the cause; the default is `bug.batch`."""

    cause = "bug.batch"
