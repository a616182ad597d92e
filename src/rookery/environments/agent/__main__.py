# ruff: noqa: T201
"""Install agents in advance: `python -m rookery.environments.agent NAME …`.

NAME is the name or TOML file of a launcher. The installed packages fit this machine's Python, as needed by
sandboxes that do not use a container image.
"""

import asyncio
import sys

from rookery.core import RookeryError
from rookery.environments.agent.installation import host_python, install_agent
from rookery.environments.agent.launchers import find_launcher


def report(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            directory = asyncio.run(install_agent(find_launcher(name), host_python(), report=report))
            report(f"{name}: {directory}")
    except RookeryError as error:
        sys.exit(str(error))
