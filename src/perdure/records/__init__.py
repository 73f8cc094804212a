"""The values of perdure's model, and their bytes: pure, strict, and data only."""

from __future__ import annotations
