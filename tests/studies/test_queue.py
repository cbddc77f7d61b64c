"""The queue of runs on a cluster, with a cluster that answers at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from unimetric.errors import Interrupted
from unimetric.studies import cluster
from unimetric.studies.board import Board
from unimetric.studies.cluster import Queue, follow, study_on_ray
from unimetric.studies.grid import expand
from unimetric.training.signals import Signals


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
    follow(queue, Signals())
    run_id = runs[0].config.run_id
    assert (ray.calls, board.states[run_id]) == (len(good), state)
    assert board.notes[run_id] == ("the reason" if state == "failed" else board.notes[run_id])


class Stopped(Ray):
    """A cluster whose runs do not end until they are canceled. SIGTERM arrives meanwhile."""

    canceled: tuple[int, ...] = ()

    def wait(self, references: list[int], **options: object) -> tuple[list[int], list[int]]:
        if not self.canceled:
            os.kill(os.getpid(), signal.SIGTERM)
        return [], references

    def cancel(self, reference: int) -> None:
        self.canceled += (reference,)


def test_sigterm_cancels_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Stopped(tmp_path, [])
    monkeypatch.setattr(cluster, "connect", lambda address: ray)
    with pytest.raises(Interrupted, match="run the same command to resume"):
        study_on_ray(expand({"seed": [0, 1]}), tmp_path, quiet=True)
    assert ray.canceled == (0, 1)
