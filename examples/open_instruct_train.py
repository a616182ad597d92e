"""Train with open-instruct on a Rookery environment. All arguments are open-instruct's, except `--write-dataset`.

python examples/open_instruct_train.py --write-dataset repairs.jsonl     # tasks of the taskset `repairs`
"""

import json
import runpy
import sys
from pathlib import Path

from rookery.adapters.open_instruct import make_rows, register

if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-dataset"]:
        rows = make_rows("swe", "repairs")
        Path(sys.argv[2]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        register()
        runpy.run_module("open_instruct.grpo_fast", run_name="__main__")
