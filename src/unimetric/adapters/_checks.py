"""Range checks that the adapters share. Adapters are built outside `spec.create`, which would wrap torch's errors."""

from __future__ import annotations

from unimetric.errors import UnimetricError


def require_positive(**sizes: int) -> None:
    """Raise an error that names the first argument below 1.

    >>> require_positive(rank=8, length=1)
    """
    for name, value in sizes.items():
        if value < 1:
            raise UnimetricError(f"`{name}` must be at least 1, got {value}", f"use `{name}=1` or a larger integer")


def require_probability(keep: float) -> None:
    """Raise an error unless `keep` is above 0 and at most 1."""
    if not 0 < keep <= 1:
        raise UnimetricError(f"`keep` must be above 0 and at most 1, got {keep}", "use `keep=0.5`, or `keep=1.0` to always keep the branch")
