"""The queue of runs on a cluster, with a cluster that answers at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from unimetric.studies import cluster
from unimetric.studies.board import Board
from unimetric.studies.cluster import Queue, follow
from unimetric.studies.grid import expand


class Lost(Exception):
    """The error of a task."""


class Ray:
    """Tasks that end at once: those of even calls write `done`, unless they all fail."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, folder: Path, good: list[bool]) -> None:
        self.folder, self.good, self.calls = folder, good, 0

    def remote(self, **options: object) -> object:
        return lambda work: SimpleNamespace(remote=self.call)

    def call(self, settings: dict, place: str, **options: object) -> int:
        self.calls += 1
        return self.calls - 1

    def wait(self, references: list[int], **options: object) -> tuple[list[int], list[int]]:
        return references, []

    def get(self, reference: int) -> None:
        if not self.good[reference]:
            raise Lost("first line\nthe reason\n")


@pytest.mark.parametrize(("good", "state"), [([True], "done"), ([False, True], "done"), ([False, False], "failed")])
def test_queue_submits_a_failed_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: list[bool], state: str) -> None:
    runs = expand({"seed": [0]})
    ray = Ray(tmp_path, good)
    monkeypatch.setattr(cluster, "finished", lambda folder, run_id: good[ray.calls - 1])
    board = Board(runs, str(tmp_path), quiet=True)
    queue = Queue(ray, str(tmp_path), board, gpus=0, cpus=1, pictures=False)
    queue.submit(runs[0])
    follow(queue)
    run_id = runs[0].config.run_id
    assert (ray.calls, board.states[run_id]) == (len(good), state)
    assert board.notes[run_id] == ("the reason" if state == "failed" else board.notes[run_id])
