"""Unit vectors, their cosine similarities and distances.

The products have custom gradients, which take fewer operations than those of autograd.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def unit(x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """Return x / |x|.

    A zero vector stays zero, with zero gradient, because 1 / |x| would overflow in half precision.
    """
    square = x.square().sum(-1, keepdim=True)
    return x * torch.where(square > 1e-12, square, math.inf).rsqrt()


def length(x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N 1"]:
    """Return |x|.

    A zero vector has zero gradient. Its second derivative is zero, too, where that of `vector_norm` is NaN.
    """
    return _Length.apply(x)


class _Length(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        ctx.save_for_backward(x, norm)
        return norm

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        x, norm = ctx.saved_tensors
        return upstream[0] * (x / norm.masked_fill(norm < 1e-18, math.inf))  # a smaller one has no square in float32


def euclidean(similarity: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Return |a - b| = sqrt(2 - 2 s) of unit vectors from their cosine s.

    The epsilon keeps the gradient finite at a = b.
    """
    return torch.rsub(similarity, 2 + epsilon, alpha=2).clamp_min(epsilon).sqrt()


def distances(a: Float[Tensor, "B D"], b: Float[Tensor, "R D"], *, epsilon: float = 1e-8) -> Float[Tensor, "B R"]:
    """Return |a - b| of any vectors from the expanded square, without a B x R x D tensor."""
    square = a.square().sum(-1)[:, None] + b.square().sum(-1)[None, :] - 2 * a @ b.T
    return square.clamp_min(0).add(epsilon).sqrt()


def class_cosines(embeddings: Float[Tensor, "B D"], proxies: Float[Tensor, "C D"]) -> Float[Tensor, "B C"]:
    """Return the cosine similarity of every embedding to every class direction.

    Computed in the precision of the directions. They are parameters and stay in float32, because
    half precision would round away the steps of their optimizer.
    """
    return cosines(embeddings.to(proxies.dtype), proxies)


def cosines(anchors: Float[Tensor, "B D"], references: Float[Tensor, "R D"] | None = None) -> Float[Tensor, "B R"]:
    """Return unit(anchors) @ unit(references).T.

    Without references, anchors are compared with each other. The backward pass takes a third of the
    operations of autograd.
    """
    result: Tensor = _SelfCosines.apply(anchors) if references is None else _Cosines.apply(anchors, references)
    return result


class _Cosines(torch.autograd.Function):
    """Cosine c = u . v of unit vectors, with dc/da = (v - c u) / |a|.

    A vector shorter than 1e-6 counts as zero and has zero gradient, as in `unit`.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        (u, a_norm), (v, b_norm) = _direction(a), _direction(b)
        cosine = _full_product(u, v)
        ctx.save_for_backward(a, b, u, v, a_norm, b_norm, cosine)
        return cosine

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        slope, (a, b, u, v, a_norm, b_norm, cosine) = upstream[0], ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative depends on the inputs
            (u, a_norm), (v, b_norm) = _direction(a), _direction(b)
        along = slope * cosine
        to_a = to_b = None
        if ctx.needs_input_grad[0]:
            to_a = torch.addcmul(slope @ v, u, along.sum(1, keepdim=True), value=-1) / a_norm
        if ctx.needs_input_grad[1]:
            to_b = torch.addcmul(slope.T @ u, v, along.sum(0)[:, None], value=-1) / b_norm
        return to_a, to_b


class _SelfCosines(torch.autograd.Function):
    """Cosines of vectors with themselves, with a single product in the backward pass."""

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
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norm = torch.where(norm > 1e-6, norm, math.inf)
    return x / norm, norm


def _full_product(u: Tensor, v: Tensor) -> Tensor:
    """Return u @ v.T in the precision of u, which autocast would reduce to half.

    Cast only if needed, because an alias loses its gradient under torch.compile.
    """
    product = u @ v.T
    return product if product.dtype == u.dtype else product.to(u.dtype)


def upcast_half(x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Convert half precision to float32, and return anything else unchanged.

    The training loop passes float32 to losses. A direct call with bfloat16 or float16 would lose
    small distances, and the sums would overflow.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def gram(x: Float[Tensor, "B D"]) -> Float[Tensor, "B B"]:
    """Return x @ x.T. Its gradient is one product instead of the sum of two."""
    return _Gram.apply(x)


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (upstream[0] + upstream[0].T).to(x) @ x  # under autocast, the upstream gradient is in half precision
