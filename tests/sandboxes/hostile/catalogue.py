"""All hostile programs, in two groups."""

from tests.sandboxes.hostile import bombs, lifetime, network, surface, visibility

DESTRUCTIVE = [*bombs.PROGRAMS, *lifetime.PROGRAMS]
"""Programs that could harm a machine. Each runs in its own sandbox."""
PROBING = [*visibility.PROGRAMS, *surface.PROGRAMS, *network.PROGRAMS]
"""Programs that look for a gap in the isolation."""
