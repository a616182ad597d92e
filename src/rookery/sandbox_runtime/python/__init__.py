"""Warm Python interpreters: start a Python program by forking an interpreter that is already running."""
