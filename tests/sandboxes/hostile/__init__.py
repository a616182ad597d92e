"""Programs that try to get out, to stay, to see or to exhaust; every one of them must end contained."""
