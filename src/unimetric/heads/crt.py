"""The coded residual transform."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, softplus

from unimetric.errors import UnimetricError


class CRT(nn.Module):
    """Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022): (B, 1 + N, C) -> (B, D).

        a_kj = log(1 + exp(x_j . c_k));   r_k = sum_j a_kj (x_j - c_k);   f = 1/K sum_k Gamma_k(r_k)

    over the positions x_j of the backbone's last stage (its summary is not used), with K prototypes c_k of L numbers and a network
    Gamma_k = Linear(L, 1024), GELU, Linear(1024, 128) for each. Two branches come of it: 128 numbers, which retrieval uses, and 1024.

    The sum is taken apart, r_k = sum_j a_kj x_j - (sum_j a_kj) c_k, so that no (B, K, N, L) tensor of residuals is ever made, and the K
    networks are batched matrix products. The mean of K biases is one bias.

    The paper contradicts itself about the branches, and there is no public code. By default both share all weights, as in its experiments:
    the mean over k of the hidden layers is the second branch, taken before their GELU. After it (`activated=True`) the mean of 64 positive
    layers starts out nearly the same for every picture, and the consistency pulls the first branch into that point. `shared=False` is its
    section 3.3: two transforms of their own, with 49 prototypes for the first branch and 64 for the second.

    Mind the size: K x L x 1024 weights are 34 million for L = 512 and 134 million for the 2048 channels of a ResNet-50, most of what the
    optimiser has to carry. `reduce=512` puts one linear layer before the prototypes.

    Args:
        dim: numbers of the first branch, the embedding.
        hidden: numbers of the hidden layer and of the second branch.
        prototypes: how many prototypes; those of the second branch where the branches share nothing.
        low_prototypes: how many the first branch has where the branches share nothing.
        shared: one set of prototypes and networks for both branches.
        activated: where they share, take the second branch after the GELU.
        reduce: channels after a linear layer before the prototypes; 0 for none, as in the paper.
        separate: a network Gamma_k for each prototype; false for one that all of them share: the ablation of table 7.
        normalise_positions: divide r_k by N, so that it does not grow with the picture; not in the paper.
        coded: false for two linear layers on the summary instead, without prototypes: the ablation of table 6.
        init: how prototypes start: `linear`, as a linear layer's weights do, or `orthogonal`, as unlike each other as can be.
        features: channels of the backbone; a run gives it.
    """

    def __init__(
        self,
        *,
        dim: int = 128,
        hidden: int = 1024,
        prototypes: int = 64,
        low_prototypes: int = 49,
        shared: bool = True,
        activated: bool = False,
        reduce: int = 0,
        separate: bool = True,
        normalise_positions: bool = False,
        coded: bool = True,
        init: str = "linear",
        features: int,
    ) -> None:
        super().__init__()
        if init not in ("linear", "orthogonal"):
            raise UnimetricError(f"`init` of the head `crt` cannot be {init!r}", "choose from: linear, orthogonal")
        if min(prototypes, low_prototypes) < 1:
            raise UnimetricError("the head `crt` needs at least one prototype", "write `crt(prototypes=64)`, as the paper has it")
        self.dim, self.dims, self.shared, self.coded = dim, (dim, hidden), shared, coded
        self.activated, self.normalise_positions = activated, normalise_positions
        self.low: nn.Module
        self.high: nn.Module
        if not coded:
            self.low, self.high = nn.Linear(features, dim), nn.Linear(features, hidden)
            return
        channels = reduce or features
        self.reduce = nn.Linear(features, reduce) if reduce else nn.Identity()
        self.coder = _Coder(prototypes if shared else low_prototypes, channels, hidden, init, separate)
        self.low = _Layers(self.coder.networks, hidden, dim)
        if not shared:
            self.high_coder = _Coder(prototypes, channels, hidden, init, separate)
            self.high = _Layers(self.high_coder.networks, hidden, hidden)

    @property
    def prototype_sets(self) -> tuple[Float[Tensor, "K L"], ...]:
        """Every distinct set of prototypes."""
        return tuple(coder.prototypes for coder in self._coders())

    def maps(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B K N"]:
        """The weight a_kj of every prototype at every position, the sets one after another: what each prototype looks at."""
        positions = self._positions(tokens)
        return torch.cat([coder.weights(positions) for coder in self._coders()], -1).transpose(1, 2)

    def branches(self, tokens: Float[Tensor, "B N C"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B H"]]:
        """What retrieval uses, and its companion in training."""
        if not self.coded:
            return self.low(tokens[:, 0]), self.high(tokens[:, 0])
        positions = self._positions(tokens)
        scale = 1 / positions.shape[1] if self.normalise_positions else 1.0
        hidden = self.coder(positions, scale)
        coded = gelu(hidden)
        if self.shared:
            return self.low(coded), (coded if self.activated else hidden).mean(0)
        return self.low(coded), self.high(gelu(self.high_coder(positions, scale)))

    def join(self, branches: tuple[Tensor, ...]) -> Float[Tensor, "B D"]:
        """The embedding is the first branch."""
        return branches[0]

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.join(self.branches(tokens))

    def _coders(self) -> list[Any]:
        if not self.coded:
            return []
        return [self.coder] if self.shared else [self.coder, self.high_coder]

    def _positions(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B N L"]:
        if tokens.shape[1] < 2:
            raise UnimetricError("the head `crt` codes positions, but this backbone gives its summary alone", 'write `head = "linear"`')
        return self.reduce(tokens[:, 1:])


class _Coder(nn.Module):
    """Prototypes, the residuals from them, and the first layer of each one's network, before its GELU: (B, N, L) -> (K, B, H)."""

    def __init__(self, count: int, channels: int, hidden: int, init: str, separate: bool) -> None:
        super().__init__()
        self.networks = count if separate else 1
        bound = channels**-0.5
        self.prototypes = nn.Parameter(torch.empty(count, channels).uniform_(-bound, bound))
        if init == "orthogonal":  # of the length that a linear layer's rows have on average
            nn.init.orthogonal_(self.prototypes, gain=math.sqrt(1 / 3))
        self.layers = _Layers(self.networks, channels, hidden, together=False)

    def weights(self, positions: Float[Tensor, "B N L"]) -> Float[Tensor, "B N K"]:
        return softplus(positions @ self.prototypes.T)

    def forward(self, positions: Float[Tensor, "B N L"], scale: float) -> Float[Tensor, "K B H"]:
        weights = self.weights(positions) if scale == 1 else self.weights(positions) * scale
        projected = weights.transpose(1, 2) @ positions  # (B, K, L)
        residuals = torch.addcmul(projected, weights.sum(1)[..., None], self.prototypes, value=-1)
        return self.layers(residuals.transpose(0, 1))


class _Layers(nn.Module):
    """K linear layers side by side, or one for all, (K, B, I) -> (K, B, O); or their mean, (B, O), which has one bias."""

    def __init__(self, count: int, inputs: int, outputs: int, *, together: bool = True) -> None:
        super().__init__()
        self.together = together
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(outputs) if together else torch.empty(count, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Float[Tensor, "K B I"]) -> Tensor:
        weight = self.weight.expand(len(x), -1, -1)
        if not self.together:
            return torch.baddbmm(self.bias, x, weight)
        return torch.bmm(x, weight).mean(0) + self.bias
