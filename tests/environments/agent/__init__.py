"""Tests of the `agent` environment, most of them in real sandboxes."""
