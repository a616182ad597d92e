"""The room's own error."""

from rookery.core import RookeryError


class BatchError(RookeryError):
    """What is there cannot be trained on as it stands: nothing of it may reach an optimiser."""
