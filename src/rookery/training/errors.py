"""The error of `rookery.training`."""

from rookery.core import RookeryError


class BatchError(RookeryError):
    """Data cannot be trained on as it is. Its code says whose fault that is: `bug.batch` unless given."""

    cause = "bug.batch"
