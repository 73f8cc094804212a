"""From stored bytes to a session again: valid, else caught up, else rebuilt."""
