"""Look at runs: statistics, comparisons, plots, and the web page of `rookery view`. It only reads runs."""
