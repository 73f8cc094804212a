"""Figures of managers, for Prometheus and for OpenTelemetry.

    metrics        the figures, what they are called, and their text for Prometheus
    opentelemetry  the same figures and spans by OpenTelemetry: extra ``otel``

They listen to the manager's events and read its ``health()``; nothing below knows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.observe.metrics import Metrics as Metrics
    from perdure.observe.opentelemetry import Telemetry as Telemetry

_HOME_OF = {
    "Metrics": "perdure.observe.metrics",
    "Telemetry": "perdure.observe.opentelemetry",
}

__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
