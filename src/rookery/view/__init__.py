"""Look at runs: statistics, comparisons, plots, and the web page of `rookery view`.

The code runs in the process of the command (`view`, `show`, `compare`, `plot`) and only reads runs.
"""

from rookery.view.comparison import Comparison, TaskPair, compare_runs
from rookery.view.summary import Summary, Throughput, read_summary

__all__ = ["Comparison", "Summary", "TaskPair", "Throughput", "compare_runs", "read_summary"]
