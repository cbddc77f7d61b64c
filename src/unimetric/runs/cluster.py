"""The connection to a Ray cluster."""

from __future__ import annotations

import importlib
import os
from typing import Any

from unimetric.errors import UnimetricError


def import_ray() -> Any:
    """Import Ray, or raise an error that says how to install it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user asks for it
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UnimetricError("`--ray` needs Ray, which is not installed", "pip install 'unimetric[ray]'") from None
