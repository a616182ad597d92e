"""Fixtures: a task cache for the test session, separate from the user's."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def task_cache(tmp_path_factory):
    cache_path = tmp_path_factory.mktemp("task-cache")
    before = os.environ.get("ROOKERY_TASK_CACHE")
    os.environ["ROOKERY_TASK_CACHE"] = str(cache_path)
    yield cache_path
    if before is None:
        del os.environ["ROOKERY_TASK_CACHE"]
    else:
        os.environ["ROOKERY_TASK_CACHE"] = before


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty task cache for tests that inspect it."""
    cache_path = tmp_path / "own-cache"
    monkeypatch.setenv("ROOKERY_TASK_CACHE", str(cache_path))
    return cache_path
