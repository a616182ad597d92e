"""Hostile programs that try to escape, spy or exhaust resources, and tests that sandboxes contain them."""
