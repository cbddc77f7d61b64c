"""The position of a run, its best epoch, and the mean loss and speed of the current epoch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unimetric.config import better, score
from unimetric.runs.device import peak_memory
from unimetric.training.log import check_finite_loss, variant_lines
from unimetric.training.scores import format_gain
from unimetric.training.state import TrainingState


@dataclass
class Progress:
    """Position of a run and its best results, as a checkpoint stores them.

    Args:
        epoch: Number of finished epochs.
        step: Number of finished steps of the current epoch.
        loss: Sum of the losses of these steps.
        best: `value`, the score that selects the epoch, `line`, the log line of the best epoch, and `score`, its score on the test
            classes.
        variants: For each head variant, the metric values of its own best epoch.
        raw: Metric values of the raw backbone, if they were measured.
        untrained: Scores of the raw backbone on the test classes and on other datasets, if they were measured.
        resumed: Whether the run continues from a checkpoint. This is not stored.
    """

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    best: dict[str, Any] | None = None
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, dict[str, Any]] = field(default_factory=dict)
    resumed: bool = False

    def notes(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {key: value for key, value in vars(self).items() if key != "resumed"}

    def at(self, epoch: int, step: int, loss: float) -> Progress:
        """Move to a position, and return the progress itself."""
        self.epoch, self.step, self.loss = epoch, step, loss
        return self

    def record(self, line: dict[str, Any], state: TrainingState) -> bool:
        """Record the metric values of an epoch, and return whether it is the best so far."""
        config = state.config
        metrics = config.metrics[: config.chosen_by]
        for name, values in variant_lines(line).items():
            before = self.variants.get(name)
            if before is None or score(metrics, values, state.chosen_on) > score(metrics, before, state.chosen_on):
                self.variants[name] = values
        value = score(metrics, line, state.chosen_on)
        improved = self.best is None or value > self.best["value"]
        if improved:
            notes: dict[str, Any] = {"chosen_on": state.chosen_on}
            lower = [text for text in (*config.test_metrics, *config.train_metrics) if better(text) == "lower"]
            if lower:
                notes["lower_is_better"] = lower  # for the report, which does not import the metrics
            self.best = {"value": value, "line": line | notes, "score": state.test_score}
        return improved

    def result(self, state: TrainingState, gains: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the log line of the best epoch, with what belongs to the whole run.

        Args:
            state: State of the run.
            gains: Gains over the untrained network; see `measure_gains`.

        Returns:
            The line, with `variants` (best results of the head variants), `raw` (metric values of the raw backbone), `gain` (over the
            untrained network) and `warning` (a sentence, if training did not help), where there are any.
        """
        assert self.best is not None, "the last epoch is always evaluated"
        more = {"variants": self.variants, "raw": self.raw, "gain": gains, "warning": self.warning(state, gains)}
        return self.best["line"] | {key: value for key, value in more.items() if value}

    def warning(self, state: TrainingState, gains: dict[str, dict[str, Any]]) -> str:
        """Return a sentence if training did not help, or hurt on other datasets, else "".

        It did not help if the best epoch is not better than the raw backbone, or is the untrained model.

        Args:
            state: State of the run.
            gains: Gains over the untrained network.
        """
        problems = [self._no_gain(state)]
        for name, gain in gains.items():
            if gain["gain"] < 0 and (name != "test" or not problems[0]):
                problems.append(f"the run ends below the untrained network on {name}: {format_gain(gain)}")
        return "; ".join(filter(None, problems))

    def _no_gain(self, state: TrainingState) -> str:
        if self.best is None or not self.raw:
            return ""
        metrics = state.config.metrics[: state.config.chosen_by]
        best, raw = self.best["value"], score(metrics, self.raw, state.chosen_on)
        untrained = self.best["line"]["epoch"] == 0
        if best > raw and not untrained:
            return ""
        problem = "the best epoch is 0, before the first step" if untrained else "no epoch is better than the raw backbone"
        name = f"{state.chosen_on} {' + '.join(metrics)}"
        return f"training did not help: {problem} ({name}: best epoch {best:.4f}, raw backbone {raw:.4f})"


class Meter:
    """Mean loss, terms and speed of an epoch.

    The loss is read from the device only on request.

    Args:
        state: State of the run.
        progress: Position of the run. Its `step` and `loss` are those of the steps before a resume.
        epoch: Index of the epoch.
        folder: Run folder, for errors.
    """

    def __init__(self, state: TrainingState, progress: Progress, epoch: int, folder: Path) -> None:
        self.state, self.progress, self.epoch, self.folder = state, progress, epoch, folder
        self.start = self.step = progress.step
        self.sum = torch.tensor(progress.loss, device=state.fabric.device)
        self.terms: dict[str, Tensor] = {}
        self.began = time.perf_counter()

    def add(self, loss: Tensor, terms: dict[str, Tensor]) -> None:
        """Add the loss and the terms of a step."""
        self.sum += loss
        self.terms = terms
        self.step += 1

    def total(self) -> float:
        """Return the sum of the losses of the epoch; raise an error if it is not finite."""
        return check_finite_loss(self.sum.item(), self.epoch, self.step - 1, self.folder)

    def speed(self) -> float:
        """Return the number of images per second."""
        return (self.step - self.start) * self.state.config.batch_size / (time.perf_counter() - self.began)

    def note(self) -> str:
        """Format loss and speed for the progress bar."""
        words = [f"loss {self.total() / self.step:.4f}", f"{self.speed():,.0f} images/s"]
        if self.progress.best is not None:
            words.append(f"best {self.progress.best['value']:.4f}")
        return "  ".join(words)

    def line(self) -> dict[str, Any]:
        """Return the log line of the finished epoch; raise an error if the loss is not finite."""
        line: dict[str, Any] = {"epoch": self.epoch + 1, "loss": self.total() / self.state.steps}
        if self.epoch == 0 and line["loss"] == 0:
            self.state.display.line(
                "warning: the loss of every batch is 0, so nothing is learned; batches need pairs of one class and of several classes "
                "that the loss, its margin and its miner do not exclude"
            )
        if len(self.terms) > 1:
            line |= {f"term/{name}": term.item() for name, term in self.terms.items()}
        return line | {
            "lr": self.state.optimizer.param_groups[0]["lr"],
            "seconds": round(time.perf_counter() - self.began, 3),
            "pictures_per_second": round(self.speed(), 1),
            "peak_memory_gib": peak_memory(self.state.fabric.device),
        }
