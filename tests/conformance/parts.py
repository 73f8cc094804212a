"""Parts of the conformance suite that a class has not yet."""

from __future__ import annotations

from perdure.testing.conformance import StoreConformance


def all_but(*parts: type) -> tuple[type, ...]:
    """Return the parts of the suite without these."""
    return tuple(part for part in StoreConformance.__bases__ if part not in parts)
