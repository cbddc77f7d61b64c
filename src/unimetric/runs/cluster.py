"""The connection to a Ray cluster."""

from __future__ import annotations

import importlib
import os
from typing import Any

from unimetric.errors import UnimetricError


def import_ray() -> Any:
    """Import Ray, or raise an error with the command that installs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry unless the user enables it
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UnimetricError("`--ray` requires Ray, which is not installed", "pip install 'unimetric[ray]'") from None


def connect(address: str) -> Any:
    """Connect to a Ray cluster, and return the module `ray`.

    Args:
        address: Address of the cluster. `auto` finds the cluster of this machine, `local` starts one here.
    """
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except ConnectionError as error:
        raise UnimetricError(f"no Ray cluster at {address!r}: {error}", "start one with `ray start --head`, or use `--ray local`") from None
    return ray
