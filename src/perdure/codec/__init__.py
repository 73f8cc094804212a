"""Bytes to model and back: pure, strict, and data only."""
