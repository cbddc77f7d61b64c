"""Batches beyond memory: the gradient of the whole batch, one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from unimetric.arguments import Count, Seed
from unimetric.errors import UnimetricError
from unimetric.geometry import upcast_half
from unimetric.objectives._around import Around


class Cached(Around):
    """Gradient cache: any objective on a batch whose activations do not fit into memory.

        1. outputs f of all chunks, without storing activations
        2. L(f) and g = dL/df, of the whole batch
        3. for each chunk:  backward pass of  sum g f,  with f computed again

    The sum of the gradients of step 3 is the gradient of L by the chain rule. Memory holds the activations of
    one chunk, and the images and outputs of the batch. Each image is passed forward twice, so a step takes
    about 4/3 of the time. Both passes use the same random numbers, so dropout and stochastic adapters
    switch off the same branches in both.

    BatchNorm in training mode normalizes each chunk separately, as it does with several devices. The result
    is then not that of the large batch. Networks without BatchNorm, and those with frozen statistics, are not
    affected. Running statistics are updated once per chunk.

    Tokens are kept only for objectives that read them, such as `s2sd`. `mixup` blends images of the whole
    batch and is rejected.

    Reference:
        Scaling deep contrastive learning batch size under memory limited setup (Gao et al., RepL4NLP 2021).

    Args:
        objective: Spec string of the objective.
        chunk: Number of images per chunk, on each device.
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
        branches: Dimensions of the head's branches. Provided by the run.
        features: Number of backbone channels. Provided by the run.
        batch_size: Number of images per step. Provided by the run.
        seed: Seed of the run. Provided by the run.
    """

    one_pass = False

    def __init__(
        self,
        *,
        objective: str = "plain",
        chunk: Count = 32,
        loss: str = "margin",
        miner: str | None = None,
        num_classes: Count,
        dim: Count,
        branches: tuple[Count, ...],
        features: Count,
        batch_size: Count,
        seed: Seed = 0,
    ) -> None:
        sizes = {"num_classes": num_classes, "dim": dim, "branches": branches, "features": features}
        super().__init__(objective, loss=loss, miner=miner, **sizes, batch_size=batch_size, seed=seed)
        if self.inner.whole_batch:
            raise UnimetricError(
                f"`cached` computes chunks separately, but the objective `{objective}` combines images of the whole batch",
                "use another objective, or `mixup` without `cached`",
            )
        self.chunk = chunk

    def forward_pass(self, model: Any, images: Float[Tensor, "B 3 H W"]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the outputs of all chunks as leaves, which receive the gradient of the loss."""
        self._first = _Pass(model, images, self.chunk)
        with torch.no_grad():
            outputs = list(self._outputs(self._first))
        trained = any(parameter.requires_grad for parameter in model.parameters())
        self._leaves = [torch.cat(each).requires_grad_(trained) for each in zip(*outputs, strict=True)]
        embeddings, tokens, *branches = self._leaves
        return embeddings, tokens, tuple(branches) or (embeddings,)

    def backward_pass(self, loss: Float[Tensor, ""], backward: Callable[[Tensor], None]) -> None:
        """Compute the gradients of the outputs, then those of the model chunk by chunk."""
        # In float16, `backward` scales the loss. The gradient of an added zero is that scale, which must not be applied twice.
        probe = torch.zeros_like(loss, requires_grad=True)
        backward(loss + probe)
        assert probe.grad is not None
        slopes = [None if leaf.grad is None else leaf.grad.div_(probe.grad).split(self.chunk) for leaf in self._leaves]
        with self._first.repeated():
            for number, outputs in enumerate(self._outputs(self._first)):
                known = [(output, slope[number]) for output, slope in zip(outputs, slopes, strict=True) if slope is not None]
                terms = [(output * slope).sum() for output, slope in known if output.requires_grad]
                if terms:
                    backward(torch.stack(terms).sum())
        del self._first, self._leaves

    def _outputs(self, work: _Pass) -> Iterator[tuple[Tensor, ...]]:
        """Yield the outputs of each chunk in at least float32; branches if there are several."""
        for chunk in work.chunks:
            embeddings, tokens, branches = work.model(chunk)
            kept = tokens if "tokens" in self.reads else tokens[:, :0].detach()
            yield tuple(upcast_half(each) for each in (embeddings, kept, *(branches if len(branches) > 1 else ())))


class _Pass:
    """First pass over a batch, and the state that it started from."""

    def __init__(self, model: Any, images: Tensor, chunk: int) -> None:
        self.model, self.chunks = model, images.split(chunk)
        self.random = torch.get_rng_state()
        self.devices, self.states = get_device_states(images)
        self.buffers = [buffer.clone() for buffer in model.buffers()]

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw the numbers of the first pass, and update the buffers as in that pass."""
        kind = self.chunks[0].device.type
        with torch.random.fork_rng(self.devices, device_type="cuda" if kind == "cpu" else kind):
            torch.set_rng_state(self.random)
            set_device_states(self.devices, self.states, device_type=kind)
            with torch.no_grad():
                for buffer, start in zip(self.model.buffers(), self.buffers, strict=True):
                    buffer.copy_(start)
            yield
