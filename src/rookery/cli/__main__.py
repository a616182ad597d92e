"""Run the command line `rookery` as `python -m rookery.cli`."""

import sys

from rookery.cli import main

if __name__ == "__main__":
    sys.exit(main())
