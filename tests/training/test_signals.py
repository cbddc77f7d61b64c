"""Several ranks agree on a stop within seconds, after the same step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import pytest
import torch
from torch import Tensor

from unimetric.training.signals import Signals


class Group:
    """Two ranks in threads. Each exchange waits for the other one, and fails if it does not come."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=20)
        self.values: dict[int, object] = {}
        self.exchanges = 0

    def exchange(self, rank: int, value: object) -> list[object]:
        self.exchanges += rank == 0
        self.values[rank] = value
        self.barrier.wait()
        found = [self.values[0], self.values[1]]
        self.barrier.wait()
        return found


class Rank:
    world_size, device = 2, torch.device("cpu")

    def __init__(self, group: Group, global_rank: int) -> None:
        self.group, self.global_rank = group, global_rank

    def all_reduce(self, tensor: Tensor, reduce_op: str) -> Tensor:
        return torch.stack(self.group.exchange(self.global_rank, tensor)).sum(0)

    def broadcast(self, value: int) -> int:
        return self.group.exchange(self.global_rank, value)[0]


@pytest.mark.parametrize(("seconds", "within", "exchanges"), [(20.0, 0, 80), (0.5, 10, 20), (0.001, 5000, 30)])
def test_ranks_stop_within_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float, within: int, exchanges: int) -> None:
    """Each has a clock of its own; those of the second one are ten times as long."""
    group, clock, now = Group(), [0.0, 0.0], local()
    asked, most = (40, 60) if seconds > 0.01 else (8_000, 30_000)

    def run(rank: int) -> int:
        signals, fabric = Signals(), Rank(group, rank)
        for step in range(1, most):
            clock[rank] += seconds * (10 if rank else 1)
            now.value = clock[rank]
            signals.requested = rank == 1 and step >= asked
            if signals.stop_requested(fabric, after_step=True):
                return step
        return most

    monkeypatch.setattr(time, "monotonic", lambda: getattr(now, "value", 0.0))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    assert asked <= first <= asked + within
    assert group.exchanges <= exchanges
