"""Self-distillation from wider target branches, which are gone at test time."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import cosines, full
from unimetric.objectives import Output
from unimetric.spec import create


class S2SD(nn.Module):
    """Simultaneous similarity-based self-distillation (Roth et al., ICML 2021; arXiv 2009.08348), over any loss.

        L = (loss(f) + mean_t loss_t(g_t)) / 2 + weight mean_t KL(S_t || S) + feature_weight KL(S_feature || S)
        KL(S_t || S) = T^2 / B sum over rows of  sum_j p_t log(p_t / p),   p = softmax over the row of S / T

    with f the embedding, g_t a small network of the features with t dimensions and a loss of its own (its own boundaries or proxies), and
    S, S_t, S_feature the (B, B) cosine similarities, diagonal included. The target side has no gradient: the embedding learns from the
    branches, never they from it. All of it lives in the objective, so that the model at test time is the plain one.

    The authors' values are the defaults. ooDML runs `dims=(1024, 1536, 2048), pool_aggr=True, delay=0` on CUB200 and CARS196, and
    `weight=5.0, feature_weight=5.0` on Stanford Online Products. In runs of a few epochs 50 holds the embedding to branches that know
    nothing yet: on glyphs and on cars 5 learns much faster.

    Args:
        loss: a part of `losses/`, for the embedding and for every target branch.
        miner: a part of `miners/`; the loss's own where none is named.
        dims: dimensions of the target branches.
        temperature: T of the softmax.
        weight: of the distillation from the target branches.
        feature_weight: of the distillation from the features; 0 leaves it out.
        delay: steps before the features are distilled.
        pool_aggr: the features are the mean and the maximum over the map, added; otherwise the backbone's summary.
        half_targets: on a GPU the networks of the target branches run in bfloat16, as the backbone does.
        num_classes: training classes.
        dim: embedding dimension.
        features: channels of the backbone.
    """

    reads = ("tokens",)
    steps: Tensor

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        dims: tuple[int, ...] = (512, 1024, 1536, 2048),
        temperature: float = 1.0,
        weight: float = 50.0,
        feature_weight: float = 50.0,
        delay: int = 1000,
        pool_aggr: bool = False,
        half_targets: bool = True,
        num_classes: int,
        dim: int,
        features: int,
    ) -> None:
        super().__init__()
        if not dims:
            raise UnimetricError("the objective `s2sd` has no target branch", "write `s2sd(dims=(1024,))`, one dimension at least")
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.losses = nn.ModuleList(create("losses", loss, miner=miner, num_classes=num_classes, dim=width) for width in dims)
        self.targets = nn.ModuleList(nn.Sequential(nn.Linear(features, t), nn.ReLU(), nn.Linear(t, t)) for t in dims)
        self.temperature, self.weight, self.feature_weight = temperature, weight, feature_weight
        self.delay, self.pool_aggr, self.half_targets = delay, pool_aggr, half_targets
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        features = full(output.features)
        if self.pool_aggr:
            features = features + full(output.tokens[:, 1:].amax(1))
        # Twenty million weights for a hundred pictures: in float32 these products would cost more than all the rest of it.
        with torch.autocast(features.device.type, dtype=torch.bfloat16, enabled=self.half_targets and features.is_cuda):
            targets = [full(target(features)) for target in self.targets]
        own = [loss(target, labels) for loss, target in zip(self.losses, targets, strict=True)]
        teachers = [cosines(target.detach()) for target in (*targets, features)]
        likeness = distillation(cosines(output.embeddings), torch.stack(teachers), temperature=self.temperature)
        terms = {
            "loss": self.loss(output.embeddings, labels) / 2,
            "targets": torch.stack(own).mean() / 2,
            "distillation": self.weight * likeness[:-1].mean(),
        }
        if self.feature_weight:
            # Chosen by arithmetic: to branch on the step would make the host wait for the device.
            terms["features"] = torch.where(self.steps >= self.delay, self.feature_weight * likeness[-1], 0)
        self.steps += 1
        return terms


def distillation(source: Float[Tensor, "B B"], targets: Float[Tensor, "T B B"], *, temperature: float) -> Float[Tensor, "T"]:
    """T^2 times the mean over rows of KL(target || source), of the rows' softmax at that temperature; the targets have no gradient."""
    wanted = (targets.detach() / temperature).log_softmax(-1)
    given = (source / temperature).log_softmax(-1)
    return temperature**2 * (wanted.exp() * (wanted - given)).sum(-1).mean(-1)
