"""Memory of the embedded samplers: training embeddings, and batches selected from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.geometry import unit
from unimetric.images.loading import to_device

#: A tensor computed on the device, and a host function from its values to the rows of the batch.
Choice = tuple[Tensor, Callable[[np.ndarray], np.ndarray]]


@dataclass
class PendingBatch:
    """Batch that was selected, or is being selected, and has not been used for training.

    Args:
        answer: Result of the device, being copied to the host.
        finish: Function from the result to the rows of the batch.
        arrived: Event recorded after the copy. `None` if there is nothing to wait for.
        asked: Whether the training loop has requested the batch since the start or the restart.
        chosen: Rows of the batch, once they are known.
    """

    answer: Tensor
    finish: Callable[[np.ndarray], np.ndarray]
    arrived: torch.cuda.Event | None = None
    asked: bool = False
    chosen: np.ndarray | None = None

    def rows(self) -> Int[np.ndarray, "B"]:
        """Return the rows of the batch, after the device has finished."""
        if self.chosen is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self.chosen = np.asarray(self.finish(self.answer.numpy()), np.int64)
        return self.chosen.copy()


class Bank:
    """Embeddings of all training rows on the training device, and the pending batches.

    The protocol is that of `unimetric.samplers`. On a GPU, a selection runs on a separate stream,
    in parallel with the step.

    Args:
        choose: Function (embeddings, epoch, step) -> `Choice`. Must not synchronize with the
            device.
        rows: Number of training rows.
        steps: Number of batches per epoch.
    """

    def __init__(self, choose: Callable[[Tensor, int, int], Choice], *, rows: int, steps: int) -> None:
        self.choose, self.rows, self.steps = choose, rows, steps
        self.embeddings: Tensor | None = None
        self.kept: dict[tuple[int, int], PendingBatch] = {}
        self._stream: torch.cuda.Stream | None = None

    def fill(self, embeddings: Float[Tensor, "N D"]) -> None:
        """Store the embeddings of the whole training set, and discard all selected batches."""
        if len(embeddings) != self.rows:
            raise UnimetricError(
                f"the sampler needs embeddings of {self.rows} training rows, got {len(embeddings)}", "embed every row once"
            )
        self._settle(embeddings.device)
        self.embeddings = unit(embeddings.detach().float()).contiguous()
        self.kept = {}

    def refresh(self, rows: Int[Tensor, "B"] | Int[np.ndarray, "B"], embeddings: Float[Tensor, "B D"]) -> None:
        """Overwrite the rows of a batch, and discard the oldest requested batch."""
        self._settle(embeddings.device)
        bank = self._filled(embeddings.device)
        rows = to_device(rows, bank.device) if isinstance(rows, np.ndarray) else rows.to(bank.device, non_blocking=True)
        # A row may occur twice, with different augmentations. Both write the later embedding, because
        # the order of writes on a GPU is random.
        later = torch.arange(len(rows), device=bank.device)
        later = torch.where(rows[:, None] == rows[None, :], later, -1).amax(1)
        bank.index_copy_(0, rows, unit(embeddings.detach().float())[later])
        trained = min((key for key, kept in self.kept.items() if kept.asked), default=None)
        if trained is not None:
            del self.kept[trained]

    def batch(self, epoch: int, step: int) -> Int[np.ndarray, "B"]:
        """Return the rows of a batch, and start the selection of the next one.

        The batch was selected when the previous one was requested.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"`step` must be between 0 and {self.steps - 1}, got {step}")
        self.kept = {key: kept for key, kept in self.kept.items() if key[0] >= epoch - 1}  # prefetching may reach the next epoch
        following = (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)
        for key in ((epoch, step), following):
            if key not in self.kept:
                self.kept[key] = self._launch(key)
        kept = self.kept[epoch, step]
        kept.asked = True
        return kept.rows()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the embeddings and the pending batches: their (epoch, step) and their rows."""
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
        """Restore a `state_dict`, on the device of the current embeddings, or else of the state."""
        self.kept = {}
        if state:
            new = state["embeddings"]
            device = new.device if self.embeddings is None else self.embeddings.device
            self._settle(device)
            self.embeddings = new.to(device, copy=True)
            keys = [(int(epoch), int(step)) for epoch, step in state["kept"].tolist()]
            self.kept = {key: PendingBatch(rows.cpu().clone(), np.asarray) for key, rows in zip(keys, state["rows"], strict=True)}

    def _filled(self, device: torch.device | None = None) -> Tensor:
        if self.embeddings is None:
            raise UnimetricError("the sampler needs embeddings before the first batch", "call `sampler.fill(embeddings)` first")
        if device is not None and self.embeddings.device != device:
            self.embeddings = self.embeddings.to(device)
        return self.embeddings

    def _settle(self, device: torch.device) -> None:
        if self._stream is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(self._stream)  # a selection may still read; the device waits, not the host

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
