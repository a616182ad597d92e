"""Looking at processes that change while they are looked at."""

import os
import subprocess
from types import ModuleType

import pytest

from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.worker import linux


@pytest.mark.parametrize("looking", [processes, linux], ids=["sandboxes", "workers"])
def test_ended_thread_does_not_hide_children(looking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    me, listdir = os.getpid(), os.listdir
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            # One that ended after it was listed stands before all others.
            monkeypatch.setattr(os, "listdir", lambda path: ["0", *listdir(path)])
            assert child.pid in looking.list_children(me)
        finally:
            child.kill()
    assert child.pid not in looking.list_children(me)
    assert looking.list_children(child.pid) == []
