"""Mutants: changes to the source that some test has to notice. ``python -m tests.mutants``."""
