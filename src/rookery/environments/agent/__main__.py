# ruff: noqa: T201  (a program: its output is for people)
"""Installs agents ahead of need, for boxes without an image: `python -m rookery.environments.agent NAME …`."""

import asyncio
import sys

from rookery.core import RookeryError
from rookery.environments.agent.installing import installed, own_python
from rookery.environments.agent.launchers import find_launcher


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            say(f"{name}: {asyncio.run(installed(find_launcher(name), own_python(), say=say))}")
    except RookeryError as error:
        sys.exit(str(error))
