"""Every hostile program, in two kinds."""

from tests.sandboxes.hostile import bombs, lifetime, network, surface, visibility

LETHAL = [*bombs.PROGRAMS, *lifetime.PROGRAMS]
"""Those that could harm a machine; each has a box of its own."""
CURIOUS = [*visibility.PROGRAMS, *surface.PROGRAMS, *network.PROGRAMS]
"""Those that look for a hole in a wall."""
