"""The keeper: the daemon that creates and supervises the `local` sandboxes of one run. Standard library only."""
