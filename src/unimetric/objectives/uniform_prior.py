"""An adversary that wants the features to fill a cube evenly."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unimetric.errors import UnimetricError
from unimetric.geometry import CounterRNG, upcast_half
from unimetric.objectives import Output
from unimetric.spec import create


class UniformPrior(nn.Module):
    """Uniform priors for data-efficient transfer (Sinha et al., 2020; arXiv 2006.16524), as in the code of ooDML, over any loss.

        L = loss(f) + weight mean over chunks h of  -log D(h)
        D minimises  mean_z -log D(z) + mean_h -log(1 - D(h)),   z even on (-1, 1)^chunk

    with h the backbone's features cut into chunks (16 of 128 for a ResNet-50) and D a small network with an Adam of its own, stepped once
    in `every` steps, the first one included, on the features of that step. The features of a ResNet follow a ReLU and so cannot fill the
    cube; the publication speaks of the embedding, which `on_embedding=True` takes in their place, before it is normalised. The
    discriminator lives in the objective: the model at test time is the plain one.

    Args:
        loss: a part of `losses/`.
        miner: a part of `miners/`; the loss's own where none is named.
        weight: of the prior: 0.2 for CUB200 and CARS196, 0.02 for Stanford Online Products.
        every: steps of the network for one of the discriminator: 10, and 200 for Stanford Online Products.
        hidden: width of the discriminator's two hidden layers: 100, and 50 for Stanford Online Products.
        chunk: numbers that the discriminator sees at once; fewer features than that are one chunk.
        lr: learning rate of the discriminator, that of the network in the paper.
        on_embedding: look at the embedding instead of the features.
        num_classes: training classes.
        dim: embedding dimension.
        features: channels of the backbone.
    """

    reads = ("tokens",)

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        weight: float = 0.2,
        every: int = 10,
        hidden: int = 100,
        chunk: int = 128,
        lr: float = 1e-5,
        on_embedding: bool = False,
        num_classes: int,
        dim: int,
        features: int,
    ) -> None:
        super().__init__()
        for key, value in (("every", every), ("chunk", chunk)):
            if value < 1:
                raise UnimetricError(f"`{key}` of the objective `uniform_prior` must be at least 1, not {value}", f"leave `{key}` out")
        width = dim if on_embedding else features
        self.chunk = min(chunk, width)
        if width % self.chunk:
            raise UnimetricError(
                f"{width} numbers do not fall into chunks of {self.chunk} for the objective `uniform_prior`",
                f"write `uniform_prior(chunk={next(size for size in range(self.chunk, 0, -1) if width % size == 0)})`",
            )
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.weight, self.every, self.on_embedding = weight, every, on_embedding
        self.discriminator = _Discriminator(self.chunk, hidden)
        self.optimizers = {"discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(0.5, 0.999))}
        self.dice = CounterRNG(3)  # not the numbers of the miner
        self.steps = 0
        self.seen: Tensor | None = None  # what the discriminator learns from after the step

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        chunks = upcast_half(output.embeddings if self.on_embedding else output.features).reshape(-1, self.chunk)
        self.seen = chunks.detach()
        return {
            "loss": self.loss(output.embeddings, labels),
            "prior": self.weight * F.softplus(-self.discriminator(chunks)).mean(),
        }

    def stepped(self) -> None:
        """One step of the discriminator, every so many steps of the network."""
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
        """What the discriminator minimises: how badly it tells even points from the chunks."""
        even = 2 * self.dice(chunks.numel()).view_as(chunks).to(chunks.dtype) - 1
        return F.softplus(-self.discriminator(even)).mean() + F.softplus(self.discriminator(chunks)).mean()

    # The host must know the step without waiting for the device, and a buffer would lie there.
    def get_extra_state(self) -> Tensor:
        """How many steps were taken, for the checkpoint."""
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        """Back from the checkpoint."""
        self.steps = int(state)


class _Discriminator(nn.Module):
    """Scores before the sigmoid. Frozen but for its own step, so that the network's backward pass need not reach its weights."""

    own_step = True

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.requires_grad_(False)

    def forward(self, chunks: Float[Tensor, "M H"]) -> Float[Tensor, "M"]:
        return self.layers(chunks)[:, 0]
