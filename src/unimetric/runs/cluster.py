"""The connection to a Ray cluster."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from unimetric.errors import UnimetricError


def import_ray() -> Any:
    """Import Ray, or raise an error with the command that installs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry unless the user enables it
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UnimetricError("`--ray` requires Ray, which is not installed", "pip install 'unimetric[ray]'") from None


def connect(address: str, *, cpus: int | None = None) -> Any:
    """Connect to a Ray cluster, and return the module `ray`.

    Args:
        address: Address of the cluster. `auto` finds the cluster of this machine, `local` starts one here that other machines
            cannot reach.
        cpus: Cores of a cluster that is started here. Defaults to those of the machine.
    """
    hint = "start one with `ray start --head`, or use `--ray local`"
    options: dict[str, Any] = {}
    if address == "local":
        # Ray reads this on import. Its processes then listen on 127.0.0.1 instead of on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options |= {"include_dashboard": False, "num_cpus": cpus}
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # 40 seconds each, if something else listens at the address
    _check_reachable(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address, hint)
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True, **options)
    except Exception as error:  # a start that takes too long raises a plain Exception
        raise UnimetricError(f"no Ray cluster at {address!r}: {error}", hint) from None
    return ray


def _check_reachable(address: str, hint: str) -> None:
    """Raise an error if nothing listens at an address with a port.

    Ray itself would try for minutes.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise UnimetricError(f"no Ray cluster at {address!r}: {error}", hint) from None
