"""Proofs about the tokenizers that `make tokenizers` made are kept beside them, not in somebody's home."""

import os
from collections.abc import Iterator

import pytest

from tests.conftest import TOKENIZERS


@pytest.fixture(autouse=True, scope="session")
def _cache() -> Iterator[None]:
    before = os.environ.get("ROOKERY_CACHE")
    if TOKENIZERS.is_dir() and before is None:
        os.environ["ROOKERY_CACHE"] = str(TOKENIZERS.parent / "cache")
    yield
    if before is None:
        os.environ.pop("ROOKERY_CACHE", None)
