"""One file per metric: `metric(space, *, ...) -> float | dict`.

`kinds.metric` declares whether higher values are better and how many neighbors a metric reads.
`measure` evaluates several metrics with one search.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(
    __name__,
    Average="unimetric.geometry.space",
    Hits="unimetric.geometry.space",
    Space="unimetric.geometry.space",
    bootstrap="unimetric.metrics._measure",
    check_list="unimetric.metrics._measure",
    check_roles="unimetric.metrics._measure",
    explain="unimetric.metrics._measure",
    interval="unimetric.metrics._measure",
    measure="unimetric.metrics._measure",
    totals_by_class="unimetric.metrics._measure",
)
