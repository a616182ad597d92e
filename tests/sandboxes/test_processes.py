"""Inspection of processes that change meanwhile."""

import os
import subprocess
from types import ModuleType

import pytest

from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.worker import linux


@pytest.mark.parametrize("module", [processes, linux], ids=["sandboxes", "workers"])
def test_ended_thread_does_not_hide_children(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    own_pid, listdir = os.getpid(), os.listdir
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            # A thread that ended after it was listed comes first.
            monkeypatch.setattr(os, "listdir", lambda path: ["0", *listdir(path)])
            assert child.pid in module.list_children(own_pid)
        finally:
            child.kill()
    assert child.pid not in module.list_children(own_pid)
    assert module.list_children(child.pid) == []
