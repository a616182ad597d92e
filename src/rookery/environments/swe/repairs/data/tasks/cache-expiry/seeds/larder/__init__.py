from larder.cache import Larder

__all__ = ["Larder"]
