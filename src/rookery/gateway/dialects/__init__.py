"""What clients speak: a dialect is one file that turns requests into asks and replies into answers."""

from rookery.gateway.dialects.protocol import Answering, Ask, BadRequestError, Dialect, Problem

__all__ = ["Answering", "Ask", "BadRequestError", "Dialect", "Problem"]
