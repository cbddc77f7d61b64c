"""One file per objective: `objective(output, labels) -> {"name": term}`.

The interface is `kinds.Objective`.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__, Output="unimetric.kinds")
