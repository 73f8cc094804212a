"""Tests of the SDKs that fail over perdure, and why: by suite, patterns of their names."""

DIFFERENCES: dict[str, dict[str, str]] = {}
