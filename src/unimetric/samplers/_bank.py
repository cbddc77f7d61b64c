"""The memory of the embedded samplers: the training set as the network sees it, and the batches chosen from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.geometry import unit

#: What a device answers, and what the host makes of the answer: the rows of the batch.
Choice = tuple[Tensor, Callable[[np.ndarray], np.ndarray]]


@dataclass
class PendingBatch:
    """A batch that was chosen, or is being chosen, and has not been trained on.

    Args:
        answer: what the device computes, on its way to the host.
        finish: the rows of the batch, from the answer.
        arrived: when the answer is there; `None` where there is nothing to wait for.
        asked: whether the engine has asked for the batch since the start or the restart.
        chosen: the rows, once they are known.
    """

    answer: Tensor
    finish: Callable[[np.ndarray], np.ndarray]
    arrived: torch.cuda.Event | None = None
    asked: bool = False
    chosen: np.ndarray | None = None

    def rows(self) -> Int[np.ndarray, "B"]:
        """The batch, once the device has answered."""
        if self.chosen is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self.chosen = np.asarray(self.finish(self.answer.numpy()), np.int64)
        return self.chosen.copy()


class Bank:
    """Embeddings of all training rows, on the training device, and the batches that were chosen and not trained on yet.

    The protocol is that of `unimetric.samplers`. On a GPU a choice runs on a stream of its own, beside the step.

    Args:
        choose: (embeddings, epoch, step) -> a `Choice`; must not wait for the device.
        rows: training rows.
        steps: batches an epoch.
    """

    def __init__(self, choose: Callable[[Tensor, int, int], Choice], *, rows: int, steps: int) -> None:
        self.choose, self.rows, self.steps = choose, rows, steps
        self.embeddings: Tensor | None = None
        self.kept: dict[tuple[int, int], PendingBatch] = {}
        self._stream: torch.cuda.Stream | None = None

    def fill(self, embeddings: Float[Tensor, "N D"]) -> None:
        """Take the whole training set in; what was chosen before is forgotten."""
        if len(embeddings) != self.rows:
            raise UnimetricError(
                f"the sampler knows {self.rows} training rows, but was filled with {len(embeddings)}", "embed every row once"
            )
        self._settle(embeddings.device)
        self.embeddings = unit(embeddings.detach().float()).contiguous()
        self.kept = {}

    def refresh(self, rows: Int[Tensor, "B"] | Int[np.ndarray, "B"], embeddings: Float[Tensor, "B D"]) -> None:
        """Overwrite the rows of a batch, and let go of the oldest batch that was asked for: it is trained on."""
        self._settle(embeddings.device)
        bank = self._filled(embeddings.device)
        rows = to_device(rows, bank.device) if isinstance(rows, np.ndarray) else rows.to(bank.device, non_blocking=True)
        # A row may be there twice, differently augmented. Both write the later one: which write comes last on a GPU is chance.
        later = torch.arange(len(rows), device=bank.device)
        later = torch.where(rows[:, None] == rows[None, :], later, -1).amax(1)
        bank.index_copy_(0, rows, unit(embeddings.detach().float())[later])
        trained = min((key for key, kept in self.kept.items() if kept.asked), default=None)
        if trained is not None:
            del self.kept[trained]

    def batch(self, epoch: int, step: int) -> Int[np.ndarray, "B"]:
        """The rows of a batch, chosen when the one before was asked for; and the choice of the next one begins."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps} batches")
        self.kept = {key: kept for key, kept in self.kept.items() if key[0] >= epoch - 1}  # an engine may load into the next epoch
        for key in ((epoch, step), (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)):
            if key not in self.kept:
                self.kept[key] = self._launch(key)
        kept = self.kept[epoch, step]
        kept.asked = True
        return kept.rows()

    def state_dict(self) -> dict[str, Tensor]:
        """The embeddings, and the batches that are kept: their (epoch, step) and their rows."""
        if self.embeddings is None:
            return {}
        keys = sorted(self.kept)
        rows = [torch.from_numpy(self.kept[key].rows()) for key in keys]
        return {
            "embeddings": self.embeddings.clone(),
            "kept": torch.tensor(keys, dtype=torch.int64).reshape(-1, 2),
            "rows": torch.stack(rows) if rows else torch.empty(0, 0, dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take a `state_dict` up, on the device of the embeddings that are there, or on that of the state."""
        self.kept = {}
        if state:
            old, new = self.embeddings, state["embeddings"]
            self._settle(new.device if old is None else old.device)
            self.embeddings = new.to(new.device if old is None else old.device, copy=True)
            keys = [(int(epoch), int(step)) for epoch, step in state["kept"].tolist()]
            self.kept = {key: PendingBatch(rows.cpu().clone(), lambda rows: rows) for key, rows in zip(keys, state["rows"], strict=True)}

    def _filled(self, device: torch.device | None = None) -> Tensor:
        if self.embeddings is None:
            raise UnimetricError("the sampler has no embeddings yet", "call `sampler.fill(embeddings)` before the first batch")
        if device is not None and self.embeddings.device != device:
            self.embeddings = self.embeddings.to(device)
        return self.embeddings

    def _settle(self, device: torch.device) -> None:
        if self._stream is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(self._stream)  # the device, not the host, waits: a choice may still read

    @torch.no_grad()
    def _launch(self, key: tuple[int, int]) -> PendingBatch:
        bank = self._filled()
        with torch.autocast(bank.device.type, enabled=False):
            if not bank.is_cuda:
                return PendingBatch(*self.choose(bank, *key))
            self._stream = self._stream or torch.cuda.Stream(bank.device)
            self._stream.wait_stream(torch.cuda.current_stream(bank.device))
            with torch.cuda.stream(self._stream):
                answer, finish = self.choose(bank, *key)
                host = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
                host.copy_(answer, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
                return PendingBatch(host, finish, arrived)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Small arrays of the host, without waiting for the device: through pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
