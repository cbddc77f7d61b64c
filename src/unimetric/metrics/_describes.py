"""What sets a metric that describes a space apart from one that judges it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Metric = TypeVar("Metric", bound=Callable[..., Any])


def describes(metric: Metric) -> Metric:
    """Mark a metric of the space's structure: neither more nor less of it is better, so that it can choose no epoch.

    Args:
        metric: the function; it says `better = "neither"` from then on.
    """
    marked: Any = metric
    marked.better = "neither"
    return metric
