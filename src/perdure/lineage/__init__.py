"""The stations between the engine and a store: one log for forks and pruned sessions."""
