"""One file per optimizer: `optimizer(groups, *, lr, ...) -> torch.optim.Optimizer`."""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
