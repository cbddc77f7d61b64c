"""Adversarial prior that makes the features fill a cube uniformly."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.arguments import Count, NonNegative
from unimetric.errors import UnimetricError
from unimetric.geometry import CounterRNG, upcast_half
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class UniformPrior(Objective):
    """Adversarial prior that makes the features fill a cube uniformly, over any loss.

        L = loss(f) + weight mean over chunks h of  -log D(h)
        D minimizes  mean_z -log D(z) + mean_h -log(1 - D(h)),   z uniform on (-1, 1)^chunk

    h are the features of the backbone, cut into chunks (16 of 128 for a ResNet-50). D is a small
    network with a separate Adam optimizer. It takes one step in `every` steps, including the first,
    on the features of that step. The discriminator belongs to the objective; the model at test time
    is the plain one.

    Differs from the paper:
        Follows the code of ooDML. The features of a ResNet follow a ReLU and so cannot fill the
        cube. The publication uses the embedding; `on_embedding=True` selects it instead, before it
        is normalized.

    Reference:
        Uniform priors for data-efficient transfer (Sinha et al., arXiv 2006.16524, 2020).

    Args:
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        weight: Weight of the prior. 0.2 for CUB200 and CARS196, 0.02 for Stanford Online Products.
        every: Number of network steps per step of the discriminator. 10, or 200 for Stanford Online
            Products.
        hidden: Width of the two hidden layers of the discriminator. 100, or 50 for Stanford Online
            Products.
        chunk: Number of features per chunk. Fewer features than that form one chunk.
        lr: Learning rate of the discriminator. The paper uses that of the network.
        on_embedding: Whether to use the embedding instead of the features.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
        features: Number of backbone channels. Provided by the run.
    """

    reads = ("tokens",)

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        weight: NonNegative = 0.2,
        every: Count = 10,
        hidden: Count = 100,
        chunk: Count = 128,
        lr: NonNegative = 1e-5,
        on_embedding: bool = False,
        num_classes: Count,
        dim: Count,
        features: Count,
    ) -> None:
        super().__init__()
        width = dim if on_embedding else features
        self.chunk = min(chunk, width)
        if width % self.chunk:
            divisor = next(size for size in range(self.chunk, 0, -1) if width % size == 0)
            raise UnimetricError(
                f"`chunk` must divide {width} in `uniform_prior`, got chunks of {self.chunk}", f"use `uniform_prior(chunk={divisor})`"
            )
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.weight, self.every, self.on_embedding = weight, every, on_embedding
        self.discriminator = _Discriminator(self.chunk, hidden)
        self.optimizers = {"discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(0.5, 0.999))}
        self.dice = CounterRNG(3)  # a different sequence from that of the miner
        self.steps = 0
        self.seen: Tensor | None = None  # chunks for the discriminator's step

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        chunks = upcast_half(output.embeddings if self.on_embedding else output.features).reshape(-1, self.chunk)
        self.seen = chunks.detach()
        return {
            "loss": self.loss(output.embeddings, labels),
            "prior": self.weight * F.softplus(-self.discriminator(chunks)).mean(),
        }

    def stepped(self) -> None:
        """Take one step of the discriminator after every `every` steps of the network."""
        if self.steps % self.every == 0 and self.seen is not None:
            optimizer = self.optimizers["discriminator"]
            self.discriminator.requires_grad_(True)
            with torch.enable_grad():
                optimizer.zero_grad()
                self.verdict(self.seen).backward()
            optimizer.step()
            self.discriminator.requires_grad_(False)
        self.steps, self.seen = self.steps + 1, None

    def verdict(self, chunks: Float[Tensor, "M H"]) -> Float[Tensor, ""]:
        """Return the loss of the discriminator, which separates uniform points from the chunks."""
        even = 2 * self.dice(chunks.numel()).view_as(chunks).to(chunks.dtype) - 1
        return F.softplus(-self.discriminator(even)).mean() + F.softplus(self.discriminator(chunks)).mean()

    # The step counter is not a buffer, because reading it from the device would synchronize.
    def get_extra_state(self) -> Tensor:
        """Return the number of steps for the checkpoint."""
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of steps from the checkpoint."""
        self.steps = int(state)


class _Discriminator(nn.Module):
    """Discriminator that returns scores before the sigmoid.

    It is frozen except in its step, so that the backward pass of the network skips its weights.
    """

    own_step = True

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.requires_grad_(False)

    def forward(self, chunks: Float[Tensor, "M H"]) -> Float[Tensor, "M"]:
        return self.layers(chunks)[:, 0]
