"""Several processes that want one session all the time."""
