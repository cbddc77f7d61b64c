"""The mathematics that losses, miners and metrics share. Everything here is a function of tensors, or a plain tuple of them.

One matrix, one meaning: rows are anchors, columns are references, an entry is the cosine similarity of unit vectors, larger is
closer. Distances come from it by a named function. Shapes are static and nothing waits for the device.

B batch, D dimension, R references (the batch itself, or a memory).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.spec import create

#: Numbers in the largest (B, M, R) block that is made where there is a choice: 64 MiB of float32.
BLOCK = 2**24

#: Numbers in a block that stays in a core's cache.
CACHED = 2**18


@dataclass(frozen=True)
class Memory:
    """References that stand in for the batch: a ring of earlier embeddings.

    Args:
        embeddings: (R, D), without gradient.
        labels: (R,).
        valid: (R,) false where the ring is not filled yet.
        own: (B,) the column in which each anchor itself stands.
    """

    embeddings: Float[Tensor, "R D"]
    labels: Int[Tensor, "R"]
    valid: Bool[Tensor, "R"]
    own: Int[Tensor, "B"]


@dataclass(frozen=True)
class Pairs:
    """Which references belong to an anchor, as two masks. To a loss over tuples it means every combination within a row.

    Args:
        positive: (B, R) same class, not the anchor itself.
        negative: (B, R) another class.
        own: (B,) the column in which each anchor itself stands.
        dim: D, which the density of distances on the sphere depends on.
    """

    positive: Bool[Tensor, "B R"]
    negative: Bool[Tensor, "B R"]
    own: Int[Tensor, "B"]
    dim: int


@dataclass(frozen=True)
class Triplets:
    """T index triplets into the rows (anchor) and columns (positive, negative) of a (B, R) matrix, and which of them count.

    Args:
        anchor, positive, negative: (T,).
        valid: (T,) false where an anchor had nothing to choose from; such a triplet adds nothing anywhere.
    """

    anchor: Int[Tensor, "T"]
    positive: Int[Tensor, "T"]
    negative: Int[Tensor, "T"]
    valid: Bool[Tensor, "T"]


# --- the sphere -----------------------------------------------------------------------------------------------------


def unit(x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """x / |x|. A zero vector stays zero, with zero gradient: 1 / |x| would blow up a half-precision number."""
    square = x.square().sum(-1, keepdim=True)
    return x * torch.where(square > 1e-12, square, math.inf).rsqrt()


def match(labels: Int[Tensor, "B"], memory: Memory | None = None, *, dim: int) -> Pairs:
    """Every positive and every negative pair of a batch, or of a batch and a memory."""
    if memory is None:
        same = labels[:, None] == labels[None, :]
        own = torch.arange(len(labels), device=labels.device)
        negative = ~same
        if torch.compiler.is_compiling():  # whatever is written into has to be made first: a mask that is not can stay within a loop
            places = torch.arange(len(labels), device=labels.device, dtype=torch.int32)
            return Pairs(same & (places[:, None] != places[None, :]), negative, own, dim)
        return Pairs(same.fill_diagonal_(False), negative, own, dim)
    same = labels[:, None] == memory.labels[None, :]
    columns = torch.arange(len(memory.labels), device=labels.device)
    other = memory.own[:, None] != columns[None, :]
    return Pairs(same & other & memory.valid, ~same & memory.valid, memory.own, dim)


def compare(embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> tuple[Float[Tensor, "B R"], Pairs]:
    """Cosine similarity of every anchor to every reference, and which pairs match."""
    anchors = unit(embeddings)
    similarity = gram(anchors) if memory is None else anchors @ unit(memory.embeddings).T
    return similarity, match(labels, memory, dim=embeddings.shape[-1])


def euclidean(similarity: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """|a - b| of unit vectors from their cosine: sqrt(2 - 2 s). The epsilon keeps the gradient finite where a = b."""
    return torch.rsub(similarity, 2 + epsilon, alpha=2).clamp_min(epsilon).sqrt()


def distances(a: Float[Tensor, "B D"], b: Float[Tensor, "R D"], *, epsilon: float = 1e-8) -> Float[Tensor, "B R"]:
    """|a - b| of any vectors, by the expanded square: no B x R x D tensor."""
    square = a.square().sum(-1)[:, None] + b.square().sum(-1)[None, :] - 2 * a @ b.T
    return square.clamp_min(0).add(epsilon).sqrt()


# --- masked reductions: an empty row gives zero, with zero gradient --------------------------------------------------


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the entries that count; zero where none does."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)


def masked_sum(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """Sum over each row's entries that count."""
    return torch.where(mask, values, 0).sum(-1)


def log_sum_exp(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """log sum exp over each row's entries that count; a very low number, without gradient, where none does."""
    low = torch.finfo(values.dtype).min / 4
    # Low, not -inf: in a row without entries -inf - -inf would make the gradient NaN.
    return torch.where(mask, values, low).logsumexp(-1)


def log1p_sum_exp(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """log(1 + sum exp) over each row's entries that count; zero, with zero gradient, where none does."""
    return torch.nn.functional.softplus(log_sum_exp(values, mask))


def masked_max(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """The largest of each row's entries that count; -inf where none does."""
    return torch.where(mask, values, -math.inf).amax(-1)


def masked_min(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B"]:
    """The smallest of each row's entries that count; +inf where none does."""
    return torch.where(mask, values, math.inf).amin(-1)


def few(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> tuple[Float[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """The entries that count, moved to the front of each row, with as many columns as any row needs; as they are where that does not pay.

    Positives are few: whatever is done to them need not be done to the whole matrix. Only a CPU counts them without waiting, and a graph
    that is captured for all batches cannot.

    Args:
        values: what they are taken from.
        mask: which count.
    """
    if values.device.type != "cpu" or values.numel() < 2**17 or torch.compiler.is_compiling():
        return values, mask
    most = max(1, int(mask.sum(-1).max()))
    if most * 8 > mask.shape[1]:
        return values, mask
    kept, columns = mask.to(torch.uint8).topk(most)
    return values.gather(1, columns), kept.bool()


# --- dice: randomness that a checkpoint keeps ------------------------------------------------------------------------


class Dice(nn.Module):
    """Uniform numbers from a hash of (seed, throw, row): the same on every device and every rank, and resumable.

    torch's generators are none of that: CPU and GPU draw differently, each rank would mine other triplets and so learn other proxies,
    and a generator object breaks `fullgraph=True`. Here the state is one counter, a buffer that lies in every checkpoint.

    Args:
        seed: numbers the sequence; a run sets it by `seed_dice`. Parts that may stand inside one another start with different ones: by
            the same numbers rho would switch just those triplets whose positive stands first.
    """

    state: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", torch.tensor([seed, 0], dtype=torch.int64))

    def forward(self, count: int) -> Float[Tensor, "count"]:
        """`count` numbers in [0, 1)."""
        if self.state.device.type == "cpu" and not torch.compiler.is_compiling():
            # The same arithmetic by numpy, whose calls cost a tenth: so few numbers are all overhead.
            seed, throw = self.state.tolist()
            self.state[1] += 1
            key = (seed * 0x9E3779B1 + throw * 0x85EBCA6B) & _MASK
            return torch.from_numpy(_fraction(_mix((np.arange(count) + key) & _MASK)))
        rows = torch.arange(count, device=self.state.device, dtype=torch.int64)
        # Each throw has a stretch of the 32-bit numbers of its own, and stretches lie far apart: multiples of an odd number near the golden
        # section do. Rows are only added, since a compiler that counts them in 32 bits could not multiply them by a large number.
        key = self.state[0] * 0x9E3779B1 + self.state[1] * 0x85EBCA6B
        self.state[1] += 1
        return uniform(rows + (key & _MASK))


_MASK = 0xFFFFFFFF


def uniform(*keys: Tensor) -> Tensor:
    """A number in [0, 1) from integer keys, 24 bits of it: the avalanche of MurmurHash3 over the keys one after another.

    Held within 32 bits of an int64, where no product overflows on any device.
    """
    state = torch.zeros((), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((state * 0x01000193 + key) & _MASK)
    return (state >> 8).to(torch.float32) * 2.0**-24


def _fraction(state: np.ndarray) -> np.ndarray:
    return (state >> 8).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: Any) -> Any:
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B)):  # both factors under 2^31: int64 products do not overflow
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def seed_dice(module: nn.Module, seed: int) -> None:
    """Give every dice below a module a sequence of its own, all from one seed."""
    dice = [part for part in module.modules() if isinstance(part, Dice)]
    for number, part in enumerate(dice):
        part.state[0] = seed * 1_000_003 + number


def draw(weights: Float[Tensor, "B R"] | Bool[Tensor, "B R"], numbers: Float[Tensor, "B"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    """One column a row, with probability proportional to its weight; and whether the row had any weight.

    By the inverse of the cumulative sum, so that one number a row is enough and no B x R noise is made.
    """
    weights = weights.to(torch.float32) if weights.dtype == torch.bool else weights
    total = weights.cumsum(-1)
    last = total[:, -1:]
    # The number may round up to the total itself: the first column that reaches the total is the last one with weight.
    target = torch.minimum(numbers[:, None].to(total.dtype) * last, last * (1 - torch.finfo(total.dtype).eps))
    return torch.searchsorted(total, target, right=True)[:, 0].clamp_max(weights.shape[1] - 1), last[:, 0] > 0


# --- miners and the losses that use them -----------------------------------------------------------------------------


def mining(loss: Any, miner: str | nn.Module | None) -> Any:
    """The miner that a loss uses: the one it is given, or its paper's. One whose tuples the loss cannot read is refused.

    A loss says `default_miner = "..."` and `reads = (Pairs, Triplets)`; a miner says `gives = Triplets`.
    """
    built = create("miners", miner or loss.default_miner)
    if built.gives not in loss.reads:
        name, wanted = type(loss).__name__, " or ".join(kind.__name__ for kind in loss.reads)
        raise UnimetricError(
            f"the loss {name} reads {wanted}, but the miner {type(built).__name__} gives {built.gives.__name__}",
            f"leave `miner` out to use {name}'s own, `{loss.default_miner}`",
        )
    return built


def triplet_hinges(
    far: Float[Tensor, "B R"], near: Float[Tensor, "B R"], pairs: Pairs, margin: float
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Int[Tensor, ""]]:
    """Sum of [far(a, p) - near(a, n) + margin]_+ over every triplet of the masks, how many are active, and how many there are.

    No B x R x R tensor is made.
    """
    total, active, _, _ = _hinges(far, near, pairs.positive, pairs.negative, margin)
    return total, active, (pairs.positive.sum(-1) * pairs.negative.sum(-1)).sum()


# An operator of its own, which a compiler leaves whole: captured for all batches, it could not count an anchor's few positives.
@torch.library.custom_op(
    "unimetric::triplet_hinges",
    mutates_args=(),
    schema="(Tensor far, Tensor near, Tensor positive, Tensor negative, float margin)"
    " -> (Tensor total, Tensor active, Tensor to_far, Tensor to_near)",
)
def _hinges(
    far: Float[Tensor, "B R"], near: Float[Tensor, "B R"], positive: Bool[Tensor, "B R"], negative: Bool[Tensor, "B R"], margin: float
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """The sum, how many are active, and the gradients of the sum, which count them for each entry."""
    reach, rivals = torch.where(positive, far + margin, -math.inf), torch.where(negative, near, math.inf)
    # To read a count makes a GPU wait. A CPU waits for nothing, and where an anchor has few positives does without the sort.
    most = max(1, int(positive.sum(-1).max())) if far.device.type == "cpu" else far.shape[1]
    if most * 8 <= far.shape[1] and most <= 64:
        reach, columns = reach.topk(most)  # (B, M)
        total, pulled, pushed = far.new_zeros(()), torch.empty_like(reach), torch.empty_like(near)
        step = max(1, CACHED // (most * far.shape[1]))  # rows at a time
        for start in range(0, len(far), step):
            rows = slice(start, start + step)
            hinge = (reach[rows, :, None] - rivals[rows, None, :]).relu_()  # (step, M, R)
            total += hinge.sum()
            violated = hinge.sign_()
            torch.sum(violated, -1, out=pulled[rows])
            torch.sum(violated, 1, out=pushed[rows])
        return total, pulled.sum(dtype=torch.float64).long(), torch.zeros_like(far).scatter_(1, columns, pulled), pushed.neg_()
    # Sorted negatives and their running sums give each positive its sum at once: O(R log R) a row.
    low, high = rivals.sort(-1).values, reach.sort(-1).values
    running = torch.nn.functional.pad(torch.where(low.isfinite(), low, 0).cumsum(-1), (1, 0))
    pulled = torch.where(positive, torch.searchsorted(low, reach), 0)  # how many negatives lie below each positive
    total = torch.where(positive, pulled * reach - running.gather(-1, pulled), 0).sum()
    pushed = torch.where(negative, far.shape[1] - torch.searchsorted(high, rivals, right=True), 0)
    return total, pulled.sum(), pulled.to(far.dtype), -pushed.to(far.dtype)


@_hinges.register_fake
def _shapes(far: Tensor, near: Tensor, positive: Tensor, negative: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return far.new_empty(()), far.new_empty((), dtype=torch.int64), torch.empty_like(far), torch.empty_like(near)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])


def _backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    to_far, to_near = ctx.saved_tensors
    return upstream * to_far, upstream * to_near, None, None, None


_hinges.register_autograd(_backward, setup_context=_save)


# --- proxies, and the ball -------------------------------------------------------------------------------------------


def class_cosines(embeddings: Float[Tensor, "B D"], proxies: Float[Tensor, "C D"]) -> Float[Tensor, "B C"]:
    """Cosine similarity of every embedding to every class's direction, in the precision of the directions.

    They are parameters and stay in float32: half precision would round away the step of their optimiser.
    """
    return cosines(embeddings.to(proxies.dtype), proxies)


def cosines(anchors: Float[Tensor, "B D"], references: Float[Tensor, "R D"] | None = None) -> Float[Tensor, "B R"]:
    """unit(anchors) @ unit(references).T, or of the anchors with themselves, with a third of the steps in its backward pass."""
    result: Tensor = _SelfCosines.apply(anchors) if references is None else _Cosines.apply(anchors, references)
    return result


class _Cosines(torch.autograd.Function):
    """With c = u . v of unit vectors, dc/da = (v - c u) / |a|. A vector shorter than 1e-6 counts as being of that length."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        (u, a_norm), (v, b_norm) = _direction(a), _direction(b)
        cosine = _full_product(u, v)
        ctx.save_for_backward(a, b, u, v, a_norm, b_norm, cosine)
        return cosine

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        slope, (a, b, u, v, a_norm, b_norm, cosine) = upstream[0], ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient's own gradient is wanted, and goes by way of the inputs
            (u, a_norm), (v, b_norm) = _direction(a), _direction(b)
        along = slope * cosine
        to_a = torch.addcmul(slope @ v, u, along.sum(1, keepdim=True), value=-1) / a_norm if ctx.needs_input_grad[0] else None
        to_b = torch.addcmul(slope.T @ u, v, along.sum(0)[:, None], value=-1) / b_norm if ctx.needs_input_grad[1] else None
        return to_a, to_b


class _SelfCosines(torch.autograd.Function):
    """The same where both sides are one: a single product in the backward pass."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        u, norm = _direction(a)
        cosine = _full_product(u, u)
        ctx.save_for_backward(a, u, norm, cosine)
        return cosine

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        slope, (a, u, norm, cosine) = upstream[0] + upstream[0].T, ctx.saved_tensors
        if torch.is_grad_enabled():
            u, norm = _direction(a)
        return torch.addcmul(slope @ u, u, (slope * cosine).sum(1, keepdim=True), value=-1) / norm


def _direction(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)
    return x / norm, norm


def _full_product(u: Tensor, v: Tensor) -> Tensor:
    """u @ v.T, which autocast would leave in half precision. Cast only where needed: an alias loses its gradient under torch.compile."""
    product = u @ v.T
    return product if product.dtype == u.dtype else product.to(u.dtype)


def to_ball(x: Float[Tensor, "*N D"], *, curvature: float, clip: float | None = None) -> Float[Tensor, "*N D"]:
    """Clip the norm, then map into the Poincare ball of radius 1/sqrt(curvature), by the exponential map at the origin.

        u = x min(1, clip / |x|);   z = tanh(sqrt(curvature) |u|) u / (sqrt(curvature) |u|)

    The result stays off the rim by a thousandth of the radius: distances have no gradient there.
    """
    root = math.sqrt(curvature)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if clip is not None:
        x = x * (clip / (norm + 1e-5)).clamp_max(1)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norm = norm.clamp_min(1e-5)
    return x * ((root * norm).tanh().clamp_max(1 - 1e-3) / (root * norm))


def poincare(a: Float[Tensor, "B D"], b: Float[Tensor, "R D"], *, curvature: float, epsilon: float = 1e-12) -> Float[Tensor, "B R"]:
    """Distance of points of the Poincare ball: 2/sqrt(c) artanh(sqrt(c) |-a (+) b|), (+) the Moebius addition.

    From inner products alone: no B x R x D tensor. The epsilon keeps the gradient finite where a = b.
    """
    aa, bb, ab = a.square().sum(-1)[:, None], b.square().sum(-1)[None, :], a @ b.T
    below = 1 - 2 * curvature * ab + curvature**2 * aa * bb
    # |-a (+) b|^2 is |a - b|^2 / below. The 1e-5 is that of the authors' code, in the denominator of the addition.
    norm = (((aa + bb - 2 * ab).clamp_min(0) + epsilon) * below.clamp_min(epsilon)).sqrt() / (below + 1e-5)
    root = math.sqrt(curvature)
    return 2 / root * (root * norm).clamp_max(1 - 1e-5).atanh()


# --- precision -------------------------------------------------------------------------------------------------------


def full(x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Half precision as float32, anything else as it is.

    The engine hands losses float32. Whoever calls one with bfloat16 or float16 would lose small distances, and the sums overflow.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# --- products --------------------------------------------------------------------------------------------------------


def gram(x: Float[Tensor, "B D"]) -> Float[Tensor, "B B"]:
    """x @ x.T. Its gradient is one product, where autograd would make two and add them."""
    return _Gram.apply(x)


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (upstream[0] + upstream[0].T).to(x) @ x  # under autocast the products came out in half precision


def triplet_cosines(
    miner: Any, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None
) -> tuple[Triplets, Float[Tensor, "T"], Float[Tensor, "T"]]:
    """What a miner of triplets finds, and the cosine similarities of anchor and positive, and of anchor and negative.

    The miner sees the whole matrix without gradient. The few that it chose are made again from their vectors, so that no B x R matrix
    goes through the backward pass. An anchor that is its own positive or negative has the similarity 1, without gradient.
    """
    anchors = unit(full(embeddings))
    references = anchors if memory is None else unit(full(memory.embeddings))
    pairs = match(labels, memory, dim=anchors.shape[-1])
    mined = miner(anchors.detach() @ references.detach().T, pairs)
    rows = anchors.index_select(0, mined.anchor)
    near = (rows * references.index_select(0, mined.positive)).sum(-1)
    far = (rows * references.index_select(0, mined.negative)).sum(-1)
    own = pairs.own[mined.anchor]
    return mined, torch.where(mined.positive == own, 1, near), torch.where(mined.negative == own, 1, far)


def as_pairs(mined: Triplets, pairs: Pairs) -> Pairs:
    """The pairs that triplets are made of, each once; an anchor that is its own positive makes none."""

    def mask(columns: Int[Tensor, "T"]) -> Bool[Tensor, "B R"]:
        seen = torch.zeros_like(pairs.positive, dtype=torch.int32)
        return seen.index_put((mined.anchor, columns), mined.valid.to(torch.int32), accumulate=True) > 0

    return Pairs(mask(mined.positive) & pairs.positive, mask(mined.negative), pairs.own, pairs.dim)
