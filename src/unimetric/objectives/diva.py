"""DiVA: four heads with four tasks, separated by an adversary."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Count, Fraction, NonNegative, Positive
from unimetric.errors import UnimetricError
from unimetric.geometry import CounterRNG, Pairs, Triplets, draw, unit
from unimetric.kinds import Miner, Objective, Output
from unimetric.spec import create


class Diva(Objective):
    """DiVA: a separate task for each of the four branches of the head `diva`.

        L = loss(disc, y) + shared aux(shared, y[pi]) + own dance(self) + intra aux(intra, within classes) + adversary
        dance = mean_i CE([q_i k_i, w_i1 q_i m_1, ..., w_iM q_i m_M] / temperature, 0)
        adversary = -rho sum over s in {shared, self, intra} of  mean over batch and dimensions of (unit(disc) unit(R_s(unit(s))))^2

    *Shared*: the labels are permuted, so the head learns features that do not separate classes.
    *Intra*: anchor, positive and negative are drawn from one class, each with replacement.
    *Self-similarity* (DaNCE): q is the head's direction for the first view. k is the direction for the
    second view, computed by an exponential moving average of the network. m are the keys of the last
    `queue` batches. w are inverse to the density of distances on the sphere: d is at least 0.5, and keys
    beyond 1.4 get no weight. They sum to 1 per query. *Adversary*: each small network R_s learns to
    predict `disc` from s. Both heads get its gradient with the opposite sign.

    Differs from the paper:
        The authors have two implementations. The defaults follow the ECCV code with its flag
        `--diva_fixed`. ooDML's script is `diva(intra_triplets='permuted', column_weights=True)`. Both
        fill the queue before training; here the first batches fill it, and empty slots do not count.
        Both shuffle the BatchNorm batches of the moving average; here it runs in test mode. With
        permuted labels, the boundary of `margin` is that of the permuted label; theirs is that of the
        true label. The paper's adversary sums over dimensions, which makes its rho 128 times smaller.

    Reference:
        Diverse visual feature aggregation for deep metric learning (Milbich et al., ECCV 2020).

    Args:
        loss: Loss spec string of the discriminative head.
        miner: Miner spec string of that loss. Defaults to the loss's miner.
        auxiliary: Loss spec string of the shared and the intra head. The loss must read triplets.
        shared: Weight of the shared head's loss: 0.3 for CUB200, 0.15 for CARS196, 0.2 for Stanford
            Online Products.
        own: Weight of the self-similarity head's loss; same values.
        intra: Weight of the intra head's loss; same values.
        rho: Weight of the adversary: 1500 for CUB200, 100 for CARS196, 150 for Stanford Online Products.
        hidden: Width of the adversary's networks.
        lr: Learning rate of the adversary's networks.
        queue: Number of batches whose keys are stored: 30, or 70 for Stanford Online Products.
        temperature: Divisor of the similarities in `dance`.
        momentum: Fraction of the moving average that is kept at each step, from 0 to 1.
        half_keys: Whether the moving average runs in bfloat16 on a GPU.
        intra_triplets: Triplets of the intra head. `all` counts every drawn triplet, also if the negative
            is the anchor. `distinct` drops those triplets. `permuted` uses the auxiliary loss on
            permuted labels with its own miner instead.
        column_weights: Normalize w over the queries of a batch instead of over the keys of a query.
        num_classes: Number of training classes.
        branches: Dimensions of the head's branches, provided by the run.
        batch_size: Number of images per step.
    """

    views = 2
    reads = ("images",)
    keys: Tensor
    state: Tensor

    def __init__(
        self,
        *,
        loss: str = "margin",
        miner: str | None = None,
        auxiliary: str = "margin",
        shared: NonNegative = 0.3,
        own: NonNegative = 0.3,
        intra: NonNegative = 0.3,
        rho: NonNegative = 1500.0,
        hidden: Count = 512,
        lr: NonNegative = 1e-5,
        queue: Count = 30,
        temperature: Positive = 0.01,
        momentum: Fraction = 0.9,
        half_keys: bool = True,
        intra_triplets: Literal["all", "distinct", "permuted"] = "all",
        column_weights: bool = False,
        num_classes: Count,
        branches: tuple[Count, ...],
        batch_size: Count,
    ) -> None:
        super().__init__()
        if len(branches) != 4 or len(set(branches)) != 1:
            raise UnimetricError(
                f"the objective `diva` needs a head with four equal branches, not {len(branches)}", 'write `head = "diva(dim=128)"`'
            )
        dim = branches[0]
        self.loss = create("losses", loss, miner=miner, num_classes=num_classes, dim=dim)
        self.shared_loss = create("losses", auxiliary, num_classes=num_classes, dim=dim)
        within = None if intra_triplets == "permuted" else _Within(distinct=intra_triplets == "distinct")
        self.intra_loss = create("losses", auxiliary, miner=within, num_classes=num_classes, dim=dim)
        if within is not None and not any(part is within for part in self.intra_loss.modules()):
            raise UnimetricError(f"`{auxiliary}` reads no triplets, which the intra head's are", "write `diva(auxiliary='margin')`")
        self.regressors = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)) for _ in ("shared", "self", "intra")
        )
        part: Any
        for part in self.regressors.modules():
            part.lr = lr
        self.shared, self.own, self.intra, self.rho = shared, own, intra, rho
        self.temperature, self.momentum, self.half_keys = temperature, momentum, half_keys
        self.permuted, self.column_weights = within is None, column_weights
        self.dice = CounterRNG(3)  # not the numbers of the miners
        self.teacher: Any = None
        self.student: list[Any] = []  # in a list, so that the model's weights do not become the objective's
        self.register_buffer("keys", torch.zeros(queue * batch_size, dim))
        self.register_buffer("state", torch.zeros(2, dtype=torch.int64))  # where the next batch goes, how much is filled

    def meet(self, model: Any) -> None:
        """Copy the network; the copy only follows."""
        self.student = [model]
        self.teacher = copy.deepcopy(model).requires_grad_(False).to(memory_format=torch.channels_last).eval()

    def train(self, mode: bool = True) -> Diva:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, output: Output, labels: Int[Tensor, "B"]) -> dict[str, Tensor]:
        disc, shared, own, intra = output.branches
        order = self._permutation(len(labels))
        adversary = sum(likeness(regressor, source, disc) for regressor, source in zip(self.regressors, (shared, own, intra), strict=True))
        return {
            "loss": self.loss(disc, labels),
            "shared": self.shared * self.shared_loss(shared, labels[order]),
            "self": self.own * self._dance(unit(own), self._look(output)),
            "intra": self.intra * self.intra_loss(intra, labels[self._permutation(len(labels))] if self.permuted else labels),
            "adversary": -self.rho * adversary,
        }

    def _permutation(self, count: int) -> Int[Tensor, "B"]:
        """Draw a random order of the batch."""
        return self.dice(count).argsort(stable=True)

    @torch.no_grad()
    def _look(self, output: Output) -> Float[Tensor, "B D"]:
        """Return the keys: embeddings of the second view by the moving average.

        Without a moving average, they are the embeddings of the branch itself.
        """
        if self.teacher is None:
            return unit(output.branches[2]).clone()
        view = output.views[0]
        with torch.autocast(view.device.type, dtype=torch.bfloat16, enabled=self.half_keys and view.is_cuda):
            key = self.teacher(view)[2][2]
        return unit(key.to(output.branches[2].dtype))

    def _dance(self, query: Float[Tensor, "B D"], key: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
        """Cross-entropy of the own key among those of the queue; then the keys join the queue."""
        place, filled = self.state.clone()
        slots = torch.arange(len(self.keys), device=key.device)
        valid = slots < filled
        memory = query @ self.keys.clone().T  # a copy: the queue is written before the backward pass reads it
        weights = inverse_density_weights(memory.detach(), valid, dim=query.shape[1], columns=self.column_weights)
        others = torch.where(valid, weights * memory, torch.finfo(memory.dtype).min / 4 * self.temperature)
        logits = torch.cat([(query * key).sum(1, keepdim=True), others], 1) / self.temperature
        self.keys.index_copy_(0, (place + slots[: len(key)]) % len(self.keys), key.to(self.keys.dtype))
        self.state.copy_(torch.stack([(place + len(key)) % len(self.keys), (filled + len(key)).clamp_max(len(self.keys))]))
        return (logits.logsumexp(1) - logits[:, 0]).mean()

    def stepped(self) -> None:
        """The copy follows the network: parameters as a moving average, statistics as they are."""
        if self.teacher is None:
            return
        mean = [parameter.detach() for parameter in self.teacher.parameters()]
        # With `precision = "bf16-true"`, the network has half precision, and the mean has not.
        new = [theirs.detach().to(mine.dtype) for mine, theirs in zip(mean, self.student[0].parameters(), strict=True)]
        torch._foreach_lerp_(mean, new, 1 - self.momentum)
        for mine, theirs in zip(self.teacher.buffers(), self.student[0].buffers(), strict=True):
            mine.copy_(theirs)


def inverse_density_weights(similarity: Float[Tensor, "B M"], valid: Tensor, *, dim: int, columns: bool = False) -> Float[Tensor, "B M"]:
    """Compute weights that are inverse to the density of distances on the sphere.

    Weights sum to 1 per row, or per column with `columns=True`. They are equal if all distances are
    beyond the cutoff.
    """
    axis = -2 if columns else -1
    square = (2 - 2 * similarity).clamp_min(0.25)
    log_weight = (3 - dim) / 2 * (square * (1 - square / 4).clamp_min(1e-8)).log() - square.log() / 2
    log_weight = torch.where(valid, log_weight, -torch.inf)
    weight = (log_weight - log_weight.amax(axis, keepdim=True).clamp_min(-1e30)).exp()
    # The authors' floor of 1e-45 is a subnormal number, which a GPU would round to zero.
    weight = torch.where(square > 1.4**2, 0, weight).clamp_min(1e-38) * valid
    return weight / weight.sum(axis, keepdim=True).clamp_min(1e-38)


def likeness(regressor: nn.Module, source: Float[Tensor, "B D"], target: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
    """Compute how well a regressor predicts one head from another.

    The gradient of both heads is reversed, so the regressor and the heads have opposite aims.
    """
    source, target = _Reverse.apply(unit(source)), _Reverse.apply(unit(target))
    return (target * unit(regressor(source))).square().mean()


class _Reverse(torch.autograd.Function):
    """Nothing forward, the opposite sign backward (Ganin & Lempitsky, ICML 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return -upstream[0]


class _Within(Miner):
    """Draw a class uniformly, then anchor, positive and negative from it, with replacement.

    Args:
        distinct: Whether triplets whose negative is the anchor are dropped.
    """

    gives = Triplets

    def __init__(self, *, distinct: bool = False) -> None:
        super().__init__()
        self.distinct = distinct
        self.dice = CounterRNG()

    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Triplets:
        rows = len(similarity)
        same = ~pairs.negative
        numbers = self.dice(3 * rows).view(3, rows)
        # Weight each sample by one over the size of its class, so that classes are uniform.
        anchor, found = draw((1 / same.sum(-1)).expand(rows, rows), numbers[0])
        positive, _ = draw(same[anchor], numbers[1])
        negative, _ = draw(same[anchor], numbers[2])
        return Triplets(anchor, positive, negative, negative != pairs.own[anchor] if self.distinct else found)
