"""Fixtures: the example provider of the documentation, as it is printed."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.sandboxes import ProviderHome
from rookery.sandboxes.remote import ServiceProvider
from tests.docs.test_docs import ROOT, blocks


@pytest.fixture
def example(tmp_path: Path) -> dict[str, Any]:
    """The names that the example defines. Its machines are below the test's directory."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(blocks(ROOT / "docs/guides/remote-sandboxes.md", "python")[0], names)
    names["FOLDER"] = tmp_path / "rented"
    return names


@pytest.fixture
async def provider(example: dict[str, Any], home: ProviderHome) -> AsyncIterator[ServiceProvider]:
    made = example["open_folders"](home)
    yield made
    await made.close()
    assert not list(example["FOLDER"].glob("*/labels.json"))
