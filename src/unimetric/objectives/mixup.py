"""Manifold mixup: blend pairs of images, or of intermediate features."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from scipy.special import betaincinv
from torch import Tensor, nn

from unimetric.arguments import Count, Positive, Range
from unimetric.errors import UnimetricError
from unimetric.geometry import CounterRNG
from unimetric.kinds import Objective, Output
from unimetric.spec import create


class Mixup(Objective):
    """Manifold mixup for metric learning, over any loss.

        h <- lam h + (1 - lam) h[pi]  at one stage
        lam ~ Beta(alpha, alpha),   pi a permutation of the batch
        L = lam loss(f, y) + (1 - lam) loss(f, y[pi])

    Each step draws one stage, one lam and one pi. For a classification loss, this equals the soft
    label of the original: cross-entropy is linear in the label lam y + (1 - lam) y[pi]. For a
    ranking loss, it is eq. 30, where a blended image has two entries. Its tuples with the labels y
    have weight lam, those with y[pi] weight 1 - lam. An image blended with one of its class has one
    entry, whose weights sum to 1. No code was published for that.

    Stage 0 is the image. Stage k of a ResNet is the input of its k-th residual stage. In a
    transformer, and in any network that is one sequence of blocks, it is the input of the block at
    k quarters. All stages are blended, with lam = 1 at those not drawn, so that there is no branch
    and one compiled graph. lam is one of 4,096 equally likely quantiles. Nothing is blended at test
    time. With several devices, each blends its slice of the batch, all with the same permutation.

    Reference:
        Manifold mixup (Verma et al., ICML 2019); eq. 30 and appendix F of Roth et al. 2020.

    Args:
        loss: Loss spec string.
        miner: Miner spec string. Defaults to the loss's miner.
        alpha: Parameter of the Beta distribution. Roth et al. use 2; larger values are closer to
            halves.
        stages: Stages to draw from, among 0, 1, 2 and 3.
        num_classes: Number of training classes. Provided by the run.
        dim: Embedding dimension. Provided by the run.
        batch_size: Number of images per step. Provided by the run.
    """

    whole_batch = True
    blends: Tensor
    scores: Tensor
    quantiles: Tensor
    choices: Tensor

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        alpha: Positive = 2.0,
        stages: Annotated[tuple[Literal[0, 1, 2, 3], ...], Range(1)] = (0, 1, 2, 3),
        num_classes: Count,
        dim: Count,
        batch_size: Count,
    ) -> None:
        super().__init__()
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.dice = CounterRNG(3)  # a different sequence from that of the miner
        levels = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
        self.register_buffer("quantiles", torch.from_numpy(betaincinv(alpha, alpha, levels.numpy())).float(), persistent=False)
        self.register_buffer("choices", torch.tensor(stages), persistent=False)
        self.register_buffer("blends", torch.ones(4))  # lam of each stage
        self.register_buffer("scores", torch.arange(batch_size) / batch_size)  # the permutation sorts them
        self.share = batch_size  # images per device

    def meet(self, model: Any) -> None:
        """Add hooks to the drawn stages of the backbone."""
        stages = model.backbone.find_stages()
        if not stages and max(self.choices.tolist()) > 0:
            raise UnimetricError(
                f"mixup requires a backbone with stages, but {type(model.backbone).__name__} has none",
                "use `mixup(stages=(0,))` to blend only images, or a ResNet or a transformer",
            )
        for number, module in enumerate([model.backbone, *stages]):
            if number in self.choices.tolist():
                module.register_forward_pre_hook(lambda module, inputs, stage=number: self.blend(module, inputs, stage))

    @torch.no_grad()
    def begin(self) -> None:
        """Draw the stage, lam and the permutation of this step."""
        numbers = self.dice(2 + len(self.scores))
        stage = self.choices[(numbers[:1] * len(self.choices)).long()]
        lam = self.quantiles[(numbers[1:2] * 4096).long()]
        self.blends.fill_(1).index_copy_(0, stage, lam.to(self.blends.dtype))
        self.scores.copy_(numbers[2:])
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.share = len(self.scores) // ranks

    def blend(self, module: nn.Module, inputs: tuple[Tensor, ...], stage: int) -> tuple[Tensor, ...] | None:
        """Blend the input of a stage with that of the partner rows, or return None at test time."""
        if not module.training:
            return None
        x, lam = inputs[0], self.blends[stage]
        return (lam * x + (1 - lam) * x.index_select(0, self.partners(len(x))), *inputs[1:])

    def partners(self, count: int) -> Int[Tensor, " count"]:
        """Return the partner of each row of a device's slice."""
        return self.scores[:count].argsort(stable=True)

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        share = min(self.share, len(labels))
        others = labels.view(-1, share).index_select(1, self.partners(share)).flatten()
        lam: Float[Tensor, ""] = self.blends.amin()
        return {"loss": lam * self.loss(output.embeddings, labels), "partner": (1 - lam) * self.loss(output.embeddings, others)}
