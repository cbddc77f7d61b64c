"""One file a metric: `metric(space, *, ...) -> float | dict`.

A metric may say `better`, an attribute of the function: "lower" where less is better, "neither" where it describes a space and judges
nothing. Without it, higher is better. The best epoch of a run is chosen accordingly.
"""

from __future__ import annotations

from unimetric.geometry.space import Average, Hits, Space
from unimetric.metrics._measure import explain, interval, measure
from unimetric.spec import find, names

__all__ = ["Average", "Hits", "Space", "explain", "interval", "measure"]


# `unimetric.metrics.recall` is the function, not the file that it stands in.
globals().update({_name: find("metrics", _name) for _name in names("metrics")})
