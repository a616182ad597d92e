"""Cache the encoder proofs of the test tokenizers beside them instead of in the user's home directory."""

import os
from collections.abc import Iterator

import pytest

from tests.conftest import TOKENIZERS


@pytest.fixture(autouse=True, scope="session")
def _encoder_cache() -> Iterator[None]:
    before = os.environ.get("ROOKERY_CACHE")
    if TOKENIZERS.is_dir() and before is None:
        os.environ["ROOKERY_CACHE"] = str(TOKENIZERS.parent / "cache")
    yield
    if before is None:
        os.environ.pop("ROOKERY_CACHE", None)
