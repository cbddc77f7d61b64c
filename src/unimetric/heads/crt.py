"""The coded residual transform."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, softplus

from unimetric.arguments import Count, Natural, NonNegative, Positive
from unimetric.errors import UnimetricError
from unimetric.geometry.kmeans import kmeans
from unimetric.heads._common import init_kaiming, pool_tokens
from unimetric.kinds import Head


class CRT(Head):
    """Coded residual transform with two branches.

        a_kj = log(1 + exp(x_j . c_k));   r_k = sum_j a_kj (x_j - c_k);   f = 1/K sum_k Gamma_k(r_k)

    x_j are the N spatial positions of the backbone's last stage, without the global token. c_k are K
    prototypes with L channels, and Gamma_k = Linear(L, 1024), GELU, Linear(1024, 128) is a separate
    network per prototype. The branches have 128 dimensions, for retrieval, and 1024.

    The sum is computed as r_k = sum_j a_kj x_j - (sum_j a_kj) c_k, without a (B, K, N, L) tensor of
    residuals. The K networks are batched matrix products, and the mean of their K biases is one bias.

    The K x L x 1024 weights of the first layers are 34 million for L = 512 and 134 million for the 2048
    channels of a ResNet-50. `reduce=512` inserts one linear layer before the prototypes.

    Differs from the paper:
        The paper contradicts itself about the branches, and there is no public code. By default both
        branches share all weights, as in its experiments. The second branch is the mean over k of the
        hidden layers before their GELU. After the GELU (`activated=True`), the mean of 64 positive
        layers is initially almost equal for all images, and the consistency loss pulls the first branch
        to that point. `nested=True` is a third reading, with a trunk Linear, GELU, Linear for both branches.
        `shared=False` is section 3.3: separate transforms with 49 and 64 prototypes.

        The paper does not state an initialization. The first author's framework (`kanshichao/CBML`)
        starts its head with `kaiming_normal_(mode="fan_out")` and zero bias, which is `init="kaiming"`.
        Applied to the K x L matrix of prototypes, it gives a standard deviation of sqrt(2 / K). For
        K = 64 and L = 2048 this is 14 times the default, and the codes of an image differ more.

    Reference:
        Coded residual transform for generalizable deep metric learning (Kan et al., NeurIPS 2022).

    Args:
        dim: Dimension of the first branch, the embedding.
        hidden: Dimension of the hidden layer and of the second branch.
        prototypes: Number of prototypes. With `shared=False`, the number in the second branch.
        low_prototypes: Number of prototypes in the first branch with `shared=False`.
        shared: Whether both branches share prototypes and networks.
        activated: Whether the second branch is computed after the GELU. Only with `shared=True`.
        nested: Whether the networks Gamma_k = Linear(L, 1024), GELU, Linear(1024, 1024) are a trunk of both
            branches. Their mean is the second branch, and a linear layer on it the first. Only with
            `shared=True`.
        class_token: Whether the global token is coded as one more position. For a transformer it is the
            class token. The paper codes the positions of the map alone.
        prototype_lr: Learning rate of the prototypes. If None, that of the head.
        reduce: Number of channels after a linear layer before the prototypes; 0 for no such layer, as in the paper.
        separate: Whether each prototype has a separate network Gamma_k. False is the ablation of table 7.
        normalise_positions: Whether to divide r_k by N, so that it does not grow with the image size. Not in the paper.
        coded: Whether to use prototypes. False is the ablation of table 6: two linear layers on a pooled vector.
        init: Initial distribution: `torch` for the range of `nn.Linear`, `kaiming` for
            `kaiming_normal_(mode="fan_out")` with zero biases, `orthogonal` for orthogonal prototypes and
            `torch` otherwise. `linear` is an older name of `torch`.
        prototype_std: Standard deviation of normally distributed initial prototypes, above 0. If None,
            `init` sets their distribution.
        residual: Whether to subtract the prototypes. If not, r_k = sum_j a_kj x_j.
        pool: Input of the linear layers with `coded=False`: `summary` for the global token, `mean` or
            `max` over the spatial positions. The global token is the class token of a transformer, and
            the mean over the positions for a backbone without one (ResNet, MiT).
        features: Number of backbone channels. Provided by the run.

    Shape:
        tokens (B, 1 + N, C) -> (B, D)
    """

    def __init__(
        self,
        *,
        dim: Count = 128,
        hidden: Count = 1024,
        prototypes: Count = 64,
        low_prototypes: Count = 49,
        shared: bool = True,
        activated: bool = False,
        nested: bool = False,
        class_token: bool = False,
        prototype_lr: NonNegative | None = None,
        reduce: Natural = 0,
        separate: bool = True,
        normalise_positions: bool = False,
        coded: bool = True,
        init: Literal["torch", "kaiming", "orthogonal", "linear"] = "torch",
        prototype_std: Positive | None = None,
        residual: bool = True,
        pool: Literal["summary", "mean", "max"] = "summary",
        features: Count,
    ) -> None:
        super().__init__(dim, (dim, hidden))
        if prototype_std is not None and init == "orthogonal":
            raise UnimetricError("crt: `prototype_std` requires an `init` other than `orthogonal`", "drop `prototype_std` or `init`")
        if coded and pool != "summary":
            raise UnimetricError(f"crt: `pool={pool!r}` requires `coded=False`", f"use `crt(coded=False, pool={pool!r})`, or drop `pool`")
        if nested and (activated or not shared):
            raise UnimetricError("crt: `nested=True` requires `shared=True` and `activated=False`", "drop the others")
        if not coded and (nested or class_token or prototype_lr is not None):
            raise UnimetricError("crt: `nested`, `class_token` and `prototype_lr` require `coded=True`", "drop them, or `coded=False`")
        self.shared, self.coded, self.nested = shared, coded, nested
        self.class_token, self.prototype_lr = class_token, prototype_lr
        self.activated, self.normalise_positions, self.pool = activated, normalise_positions, pool
        self.low: nn.Module
        self.high: nn.Module
        if not coded:
            self.low, self.high = _linear(features, dim, init), _linear(features, hidden, init)
            return
        channels = reduce or features
        self.reduce = _linear(features, reduce, init) if reduce else nn.Identity()
        options: dict[str, Any] = {"init": init, "std": prototype_std, "separate": separate, "residual": residual}
        self.coder = _Coder(prototypes if shared else low_prototypes, channels, hidden, **options)
        if nested:
            self.high = _Layers(self.coder.networks, hidden, hidden, init=init)
            self.low = _linear(hidden, dim, init)
            return
        self.low = _Layers(self.coder.networks, hidden, dim, init=init)
        if not shared:
            self.high_coder = _Coder(prototypes, channels, hidden, **options)
            self.high = _Layers(self.high_coder.networks, hidden, hidden, init=init)

    @property
    def prototype_sets(self) -> tuple[Float[Tensor, "K L"], ...]:
        """Return every distinct set of prototypes."""
        return tuple(coder.prototypes for coder in self._coders())

    @torch.no_grad()
    def start_prototypes(self, tokens: Float[Tensor, "B N C"]) -> None:
        for prototypes in self.prototype_sets:
            positions = self._positions(tokens.to(prototypes.dtype)).flatten(0, 1)
            if len(positions) < len(prototypes):
                raise UnimetricError(
                    f"`prototypes` must be at most the number of positions of a batch with `start='kmeans'`, "
                    f"got {len(prototypes)} prototypes and {len(positions)} positions",
                    "use fewer `prototypes`, a larger `batch_size`, or `start='head'`",
                )
            prototypes.copy_(kmeans(positions, len(prototypes), seeding="plusplus").centers)

    def maps(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B K N"]:
        """Return the weight a_kj of every prototype at every position, with all sets concatenated."""
        positions = self._positions(tokens)[:, self.class_token :]
        return torch.cat([coder.weights(positions) for coder in self._coders()], -1).transpose(1, 2)

    def branches(self, tokens: Float[Tensor, "B N C"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B H"]]:
        """Return the embedding and the second branch, which is used only in training."""
        if not self.coded:
            pooled = pool_tokens(tokens, self.pool)
            return self.low(pooled), self.high(pooled)
        positions = self._positions(tokens)
        scale = 1 / positions.shape[1] if self.normalise_positions else 1.0
        hidden = self.coder(positions, scale)
        coded = gelu(hidden)
        if self.nested:
            trunk = self.high(coded)
            return self.low(trunk), trunk
        if self.shared:
            return self.low(coded), (coded if self.activated else hidden).mean(0)
        return self.low(coded), self.high(gelu(self.high_coder(positions, scale)))

    def forward(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B D"]:
        return self.join(self.branches(tokens))

    def groups(self, lr: float) -> list[dict[str, Any]]:
        if self.prototype_lr is None:
            return super().groups(lr)
        chosen = {id(weight) for weight in self.prototype_sets}
        others = [weight for weight in self.parameters() if id(weight) not in chosen]
        return [
            {"name": "head", "params": others, "lr": lr},
            {"name": "prototypes", "params": list(self.prototype_sets), "lr": self.prototype_lr},
        ]

    def _coders(self) -> list[Any]:
        if not self.coded:
            return []
        return [self.coder] if self.shared else [self.coder, self.high_coder]

    def _positions(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B N L"]:
        if tokens.shape[1] < 2:
            raise UnimetricError(
                "the head `crt` requires spatial positions, but the backbone returns only a global token", 'use `head = "linear"`'
            )
        return self.reduce(tokens[:, 0 if self.class_token else 1 :])


def _linear(inputs: int, outputs: int, init: str) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    if init == "kaiming":
        init_kaiming(layer)
    return layer


class _Coder(nn.Module):
    """Prototypes, residuals from them, and the first layer of each Gamma_k before its GELU.

    Shape:
        positions (B, N, L) -> (K, B, H)
    """

    def __init__(self, count: int, channels: int, hidden: int, *, init: str, std: float | None, separate: bool, residual: bool) -> None:
        super().__init__()
        self.networks, self.residual = count if separate else 1, residual
        bound = channels**-0.5
        self.prototypes = nn.Parameter(torch.empty(count, channels).uniform_(-bound, bound))
        if init == "orthogonal":  # with the mean length of the rows of a linear layer
            nn.init.orthogonal_(self.prototypes, gain=math.sqrt(1 / 3))
        elif std is not None:
            nn.init.normal_(self.prototypes, std=std)
        elif init == "kaiming":  # the fan-out of a layer from L channels to K weights is K
            nn.init.kaiming_normal_(self.prototypes, mode="fan_out")
        self.layers = _Layers(self.networks, channels, hidden, together=False, init=init)

    def weights(self, positions: Float[Tensor, "B N L"]) -> Float[Tensor, "B N K"]:
        return softplus(positions @ self.prototypes.T)

    def forward(self, positions: Float[Tensor, "B N L"], scale: float) -> Float[Tensor, "K B H"]:
        weights = self.weights(positions) if scale == 1 else self.weights(positions) * scale
        codes = weights.transpose(1, 2) @ positions  # (B, K, L)
        if self.residual:
            codes = torch.addcmul(codes, weights.sum(1)[..., None], self.prototypes, value=-1)
        return self.layers(codes.transpose(0, 1))


class _Layers(nn.Module):
    """K parallel linear layers, or one shared layer; or their mean, which has one bias.

    Shape:
        (K, B, I) -> (K, B, O), or (B, O) with `together`
    """

    def __init__(self, count: int, inputs: int, outputs: int, *, together: bool = True, init: str) -> None:
        super().__init__()
        self.together = together
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(outputs) if together else torch.empty(count, 1, outputs).uniform_(-bound, bound))
        if init == "kaiming":  # `kaiming_normal_` would read the fan-out from the wrong axes
            nn.init.normal_(self.weight, std=math.sqrt(2 / outputs))
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "K B I"]) -> Tensor:
        weight = self.weight.expand(x.shape[0], -1, -1)
        if not self.together:
            return torch.baddbmm(self.bias, x, weight)
        return torch.bmm(x, weight).mean(0) + self.bias
