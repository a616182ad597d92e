"""What all sessions of a process share: credits for calls under way."""

from rookery.upstreams.places import Places


class Credits(Places):
    """A bound on calls under way at one upstream, over all of its replicas; the supervisor grants the size."""
