"""Sessions, turns and their manager: what users hold."""
