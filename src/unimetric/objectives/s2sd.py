"""Self-distillation from wider target branches, which are not used at test time."""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Count, Natural, NonNegative, Positive, Range
from unimetric.geometry import cosines, upcast_half
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class S2SD(Objective):
    """Self-distillation from wider target branches, over any loss.

        L = (loss(f) + mean_t loss_t(g_t)) / 2 + weight mean_t KL(S_t || S) + feature_weight KL(S_feature || S)
        KL(S_t || S) = T^2 / B sum over rows of  sum_j p_t log(p_t / p),   p = softmax over the row of S / T

    f is the embedding. g_t is a small network of the features with t dimensions, with a separate loss
    and its thresholds or proxies. S, S_t and S_feature are the (B, B) cosine similarities, diagonal
    included. The target side has no gradient, so the branches do not learn from the embedding. All
    branches belong to the objective; the model at test time is the plain one.

    The defaults are those of the authors. ooDML (Milbich et al. 2021) uses
    `dims=(1024, 1536, 2048), pool_aggr=True, delay=0` on CUB200 and Cars196, and
    `dims=(1024, 1536, 2048), weight=5.0, feature_weight=5.0` on Stanford Online Products, with
    `margin(or_count=True)`. The count matters here: the loss is weighed against the distillation.

    Reference:
        Simultaneous similarity-based self-distillation for deep metric learning (Roth et al., ICML 2021).

    Args:
        loss: Loss spec string, for the embedding and for every target branch.
        miner: Miner spec string. Defaults to the loss's miner.
        dims: Dimensions of the target branches.
        temperature: Temperature T of the softmax.
        weight: Weight of the distillation from the target branches.
        feature_weight: Weight of the distillation from the features; 0 skips it.
        delay: Number of steps before the features are distilled.
        pool_aggr: Whether the features are the sum of mean and maximum over the map. If not, they are the global token.
        half_targets: Whether the target networks run in bfloat16 on a GPU, as the backbone does.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
        features: Number of backbone channels. Provided by the run.
    """

    reads = ("tokens",)
    steps: Tensor

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        dims: Annotated[tuple[Count, ...], Range(1)] = (512, 1024, 1536, 2048),
        temperature: Positive = 1.0,
        weight: NonNegative = 50.0,
        feature_weight: NonNegative = 50.0,
        delay: Natural = 1000,
        pool_aggr: bool = False,
        half_targets: bool = True,
        num_classes: Count,
        dim: Count,
        features: Count,
    ) -> None:
        super().__init__()
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.losses = nn.ModuleList(create("losses", loss, miner=miner, num_classes=num_classes, dim=width) for width in dims)
        self.targets = nn.ModuleList(nn.Sequential(nn.Linear(features, t), nn.ReLU(), nn.Linear(t, t)) for t in dims)
        self.temperature, self.weight, self.feature_weight = temperature, weight, feature_weight
        self.delay, self.pool_aggr, self.half_targets = delay, pool_aggr, half_targets
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        features = upcast_half(output.features)
        if self.pool_aggr:
            features = features + upcast_half(output.tokens[:, 1:].amax(1))
        # With twenty million weights for about a hundred images, these products would dominate the step in float32.
        with torch.autocast(features.device.type, dtype=torch.bfloat16, enabled=self.half_targets and features.is_cuda):
            targets = [upcast_half(target(features)) for target in self.targets]
        own = [loss(target, labels) for loss, target in zip(self.losses, targets, strict=True)]
        teachers = [cosines(target.detach()) for target in (*targets, features)]
        divergence = distillation(cosines(output.embeddings), torch.stack(teachers), temperature=self.temperature)
        terms = {
            "loss": self.loss(output.embeddings, labels) / 2,
            "targets": torch.stack(own).mean() / 2,
            "distillation": self.weight * divergence[:-1].mean(),
        }
        if self.feature_weight:
            # Selected by arithmetic, because branching on the step would synchronize with the device.
            terms["features"] = torch.where(self.steps >= self.delay, self.feature_weight * divergence[-1], 0)
        self.steps += 1
        return terms


def distillation(source: Float[Tensor, "B B"], targets: Float[Tensor, "T B B"], *, temperature: float) -> Float[Tensor, "T"]:
    """Return T^2 times the mean over rows of KL(target || source).

    The distributions are the softmax of the rows at temperature T. The targets have no gradient.
    """
    wanted = (targets.detach() / temperature).log_softmax(-1)
    given = (source / temperature).log_softmax(-1)
    return temperature**2 * (wanted.exp() * (wanted - given)).sum(-1).mean(-1)
