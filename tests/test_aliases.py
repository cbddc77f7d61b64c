"""Old public names still work."""

from __future__ import annotations

import torch

from unimetric import Space, samplers


def test_old_names_of_python_work() -> None:
    assert samplers.share is samplers.rank_slice
    space = Space(torch.eye(4)[[0, 0, 1, 1]] + 0.1, torch.tensor([0, 0, 1, 1]))
    assert torch.equal(space.neighbours(1), space.neighbors(1))
