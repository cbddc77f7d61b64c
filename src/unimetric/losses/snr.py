"""Signal-to-noise ratio loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import NonNegative, Real
from unimetric.geometry import Memory, Pairs, Triplets, masked_mean, match, triplet_hinges, unit, upcast_half
from unimetric.kinds import Loss
from unimetric.losses._mining import resolve_miner


class SNR(Loss):
    """Triplet loss on the noise variance of a pair relative to the anchor's variance.

        mean over active triplets of  [snr(a, p) - snr(a, n) + margin]_+  +  nu mean_a |sum of f_a|

        snr(a, x) = var(f_a - f_x) / var(f_a)

    f are the normalized embeddings. Variances are over their D components.

    Differs from the paper:
        Eq. 15 of Roth et al. 2020 omits the squares of the variances and the mean. Their code sets
        `nu` to 0 with the plain distance-weighted miner and keeps 0.005 with rho. Use `snr(nu=0.0)`
        for their row SNR (D), and the default for R-SNR.

    Reference:
        Signal-to-noise ratio: a robust distance metric for deep metric learning (Yuan et al., CVPR
        2019); eq. 15 of Roth et al. 2020.

    Args:
        margin: Margin between the two ratios.
        nu: Weight of the penalty that centers the embeddings; lambda in the paper.
        miner: Miner spec string. Defaults to `distance_weighted`; `all` uses every triplet of the
            batch without building them.

    Shape:
        embeddings (B, D), labels (B,) -> scalar
    """

    family = "tuple"
    default_miner = "distance_weighted"
    reads = (Triplets, Pairs)

    def __init__(self, *, margin: Real = 0.2, nu: NonNegative = 0.005, miner: str | nn.Module | None = None) -> None:
        super().__init__()
        self.margin, self.nu = margin, nu
        self.miner = resolve_miner(self, miner)

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        anchors = unit(upcast_half(embeddings))
        references = anchors if memory is None else unit(upcast_half(memory.embeddings))
        mined = self.miner(anchors.detach() @ references.detach().T, match(labels, memory, dim=anchors.shape[-1]))
        # With the means removed, variances are squared lengths, and their D - 1 cancel in the ratio.
        signal = anchors - anchors.mean(-1, keepdim=True)
        other = signal if memory is None else references - references.mean(-1, keepdim=True)
        power = signal.square().sum(-1)
        inverse = torch.where(power > 1e-8, 1 / power.clamp_min(1e-8), 0)  # a constant embedding has no signal, and its ratios are 0
        penalty = self.nu * anchors.sum(-1).abs().mean()
        if isinstance(mined, Triplets):
            a, p, n = signal.index_select(0, mined.anchor), other.index_select(0, mined.positive), other.index_select(0, mined.negative)
            noise = ((a - p).square() - (a - n).square()).sum(-1) * inverse.gather(0, mined.anchor)
            return masked_mean(noise + self.margin, mined.valid & (noise + self.margin > 0)) + penalty
        noise = (power[:, None] + other.square().sum(-1) - 2 * signal @ other.T) * inverse[:, None]  # (B, R)
        total, active, _ = triplet_hinges(noise, noise, mined, self.margin)
        return total / active.clamp_min(1) + penalty
