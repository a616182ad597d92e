"""The keeper: a daemon that creates and supervises `local` sandboxes of one run. Standard library only."""
