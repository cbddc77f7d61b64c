"""Manifold mixup: pictures, or what the network makes of them midway, blended in pairs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from scipy.special import betaincinv
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import CounterRNG
from unimetric.objectives import Output
from unimetric.spec import create


class Mixup(nn.Module):
    """Manifold mixup (Verma et al., ICML 2019) for metric learning; eq. 30 and appendix F of Roth et al. 2020, over any loss.

        h <- lam h + (1 - lam) h[pi]  at one stage,   lam ~ Beta(alpha, alpha),   pi a permutation of the batch
        L = lam loss(f, y) + (1 - lam) loss(f, y[pi])

    Each step draws one stage, one lam and one pi. For a classification loss this is the soft label of the original: cross-entropy is
    linear in the label, so the one with lam y + (1 - lam) y[pi] is exactly this sum. For a ranking loss it is eq. 30, where a blended
    picture has two entries: its tuples by the labels y count with lam, those by y[pi] with 1 - lam; a picture that is blended with one of
    its class has one entry, and its weights add up to 1. No code was published for that.

    Stage 0 is the picture; stage k of a ResNet is what enters its k-th residual stage. Of a transformer, and of any network that is one
    sequence of blocks, it is what enters the block at k quarters. Blends are made at every stage, with lam = 1 at those not drawn: no
    branch, one compiled graph. lam is one of 4,096 equally likely quantiles. Nothing is blended at test time. Over several devices each
    blends its own share of the batch, all by the same permutation.

    Args:
        loss: a part of `losses/`.
        miner: a part of `miners/`; the loss's own where none is named.
        alpha: of the Beta distribution; 2 in Roth et al., larger is closer to halves.
        stages: those to draw from, among 0, 1, 2 and 3.
        num_classes: training classes.
        dim: embedding dimension.
        batch_size: pictures a step.
    """

    blends: Tensor
    scores: Tensor
    quantiles: Tensor
    choices: Tensor

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        alpha: float = 2.0,
        stages: tuple[int, ...] = (0, 1, 2, 3),
        num_classes: int,
        dim: int,
        batch_size: int,
    ) -> None:
        super().__init__()
        if not stages or not set(stages) <= {0, 1, 2, 3}:
            raise UnimetricError(f"mixup has the stages 0, 1, 2 and 3, not {stages!r}", "write `mixup(stages=(0, 1, 2, 3))`")
        if alpha <= 0:
            raise UnimetricError(f"`alpha` of the objective `mixup` must be above 0, not {alpha}", "write `mixup(alpha=2.0)`")
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.dice = CounterRNG(3)  # not the numbers of the miner
        levels = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
        self.register_buffer("quantiles", torch.from_numpy(betaincinv(alpha, alpha, levels.numpy())).float(), persistent=False)
        self.register_buffer("choices", torch.tensor(stages), persistent=False)
        self.register_buffer("blends", torch.ones(4))  # lam of each stage
        self.register_buffer("scores", torch.arange(batch_size) / batch_size)  # the permutation sorts them
        self.share = batch_size  # pictures on one device

    def meet(self, model: Any) -> None:
        """Stand at the stages of the backbone."""
        places = [model.backbone, *_stages(model.backbone, wanted=max(self.choices.tolist()) > 0)]
        for number, place in enumerate(places):
            if number in self.choices.tolist():
                place.register_forward_pre_hook(lambda module, inputs, stage=number: self.blend(module, inputs, stage))

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
        """What enters a stage, each row with its partner's; at test time as it is."""
        if not module.training:
            return None
        x, lam = inputs[0], self.blends[stage]
        return (lam * x + (1 - lam) * x.index_select(0, self.partners(len(x))), *inputs[1:])

    def partners(self, count: int) -> Int[Tensor, "count"]:
        """Whom each row of a device's share is blended with."""
        return self.scores[:count].argsort(stable=True)

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        share = min(self.share, len(labels))
        others = labels.view(-1, share).index_select(1, self.partners(share)).flatten()
        lam: Float[Tensor, ""] = self.blends.amin()
        return {"loss": lam * self.loss(output.embeddings, labels), "partner": (1 - lam) * self.loss(output.embeddings, others)}


def _stages(backbone: Any, *, wanted: bool) -> list[nn.Module]:
    """The modules before which stages 1, 2 and 3 are blended."""
    network: Any = getattr(backbone, "network", backbone)
    if hasattr(network, "layer4"):
        return [network.layer1, network.layer2, network.layer3]
    for name in ("blocks", "stages", "layers"):
        blocks = getattr(network, name, None)
        if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks):
            return [blocks[len(blocks) * quarter // 4] for quarter in (1, 2, 3)]
    if wanted:
        raise UnimetricError(
            f"mixup finds no stages in the backbone {type(network).__name__}",
            "write `mixup(stages=(0,))` to blend the pictures alone, or choose a ResNet or a transformer",
        )
    return []
