"""Plain float64 transcriptions of what PUMA's code (Kim et al.) computes; no line is copied.

The transformer is written out from the weights of timm's, so that nothing of the adapted forward pass is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .reference_revisiting import cross_entropy, directions, mean, others

Branch = Callable[[Tensor], Tensor]


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attention(attn: Any, x: Tensor, weight: Tensor, bias: Tensor, change: tuple[Tensor, Tensor] | None) -> Tensor:
    """Attention from the joint weights of q, k and v; `change` is added to q and to k."""
    q, k, v = (x @ weight.T + bias).chunk(3, -1)
    if change is not None:
        q, k = q + change[0], k + change[1]
    heads, size = attn.num_heads, q.shape[-1] // attn.num_heads
    outputs = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        mixed = (q[..., part] @ k[..., part].mT / math.sqrt(size)).softmax(-1)
        outputs.append(mixed @ v[..., part])
    return torch.cat(outputs, -1) @ attn.proj.weight.T + attn.proj.bias


def transformer(
    network: Any,
    images: Tensor,
    *,
    prompt: Callable[[Tensor], Tensor] | None = None,
    deep: Tensor | None = None,
    beside_attention: Sequence[Branch] = (),
    beside_mlp: Sequence[Branch] = (),
    lora: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]] = (),
    projections: Sequence[Any] = (),
) -> Tensor:
    """(B, 1 + N, C): the class token and the patches after the last norm; prompt tokens are dropped.

    Args:
        network: timm's; only its weights are read.
        images: (B, 3, H, W).
        prompt: From the patch embeddings (B, N, C), the prompt tokens. They get the class token's position.
        deep: (layers, P, C) tokens that replace the prompt in every layer. They get no position.
        beside_attention, beside_mlp: A branch per layer on the output of the layer's first and second norm.
        lora: Per layer, what is added to q and to k.
        projections: Per layer the frozen projection to q, k and v; the network's own by default.
    """
    count = len(images)
    proj = network.patch_embed.proj
    patches = torch.nn.functional.conv2d(images, proj.weight, proj.bias, stride=proj.stride).flatten(2).mT
    cls = (network.cls_token + network.pos_embed[:, :1]).expand(count, -1, -1)
    parts = [cls, patches + network.pos_embed[:, 1:]]
    length = 0
    if prompt is not None or deep is not None:
        tokens = torch.zeros(count, deep.shape[1], patches.shape[2], dtype=patches.dtype) if prompt is None else prompt(patches)
        parts.insert(1, tokens + network.pos_embed[:, :1])
        length = tokens.shape[1]
    x = torch.cat(parts, 1)
    for number, block in enumerate(network.blocks):
        if deep is not None:  # in the first layer, too: the tokens of the input are replaced at once
            x = torch.cat([x[:, :1], deep[number].expand(count, -1, -1), x[:, 1 + length :]], 1)
        normal = layer_norm(block.norm1, x)
        projection = projections[number] if projections else block.attn.qkv
        change = lora[number](normal) if lora else None
        after = x + attention(block.attn, normal, projection.weight, projection.bias, change)
        if beside_attention:
            after = after + beside_attention[number](normal)
        normal = layer_norm(block.norm2, after)
        x = after + gelu(normal @ block.mlp.fc1.weight.T + block.mlp.fc1.bias) @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        if beside_mlp:
            x = x + beside_mlp[number](normal)
    x = layer_norm(network.norm, x)
    return torch.cat([x[:, :1], x[:, 1 + length :]], 1)


def adapter(down: Tensor, up: Tensor, gate: Tensor | float = 1.0, scale: float = 0.1) -> Branch:
    """Stochastic adapter. The gate is 0 or 1/keep per image in training (timm's DropPath), and 1 in testing."""

    def branch(x: Tensor) -> Tensor:
        return torch.as_tensor(gate).view(-1, 1, 1) * (scale * ((x @ down).clamp_min(0) @ up))

    return branch


def adaptformer(down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor, scale: float = 0.1) -> Branch:
    return lambda x: scale * ((x @ down + down_bias).clamp_min(0) @ up + up_bias)


def lora(
    downs: Sequence[Tensor], ups: Sequence[Tensor], scale: float, gates: Sequence[Tensor | float] = (1.0, 1.0)
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One gate for q and one for k (prompt.py:312)."""

    def change(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (torch.as_tensor(g).view(-1, 1, 1) * (scale * (x @ d @ u)) for d, u, g in zip(downs, ups, gates, strict=True))
        return q, k

    return change


def pool(keys: Tensor, attended: Tensor, prompts: Tensor, patches: Tensor, batchnorm: bool = True) -> Tensor:
    """Prompt pool. `batchnorm`: a BatchNorm in permanent test mode divides the weights by the root of 1 + 1e-5 (prompt.py:122)."""
    tokens, divisor = [], math.sqrt(1 + 1e-5) if batchnorm else 1.0
    for image in patches.detach():
        query = (image.mean(0) + image.max(0).values) / 2
        mixed = torch.zeros_like(prompts[0])
        for key, a, prompt in zip(keys, attended, prompts, strict=True):
            x = query * a.softmax(0)
            mixed = mixed + (x @ key) / x.norm() / key.norm() / divisor * prompt
        tokens.append(mixed)
    return torch.stack(tokens)


# --- losses ----------------------------------------------------------------------------------------------------------


def turned(cosine: Tensor, angle: float) -> Tensor:
    """cos(theta + angle), and a linear continuation beyond pi - angle."""
    phi = cosine * math.cos(angle) - (1 - cosine**2).sqrt() * math.sin(angle)
    return torch.where(cosine > math.cos(math.pi - angle), phi, cosine - math.sin(math.pi - angle) * angle)


def curricularface(
    z: Tensor, labels: Tensor, proxies: Tensor, t: list[float], scale: float = 32, angle: float = 0.3
) -> tuple[Tensor, list[float]]:
    """The loss and the next t: one per class, updated after use."""
    cosine, rows = directions(z) @ directions(proxies).T, []
    for row, y in zip(cosine, labels.tolist(), strict=True):
        own = turned(row[y], angle)
        logits = [own if c == y else s if own >= s else s * (s + t[y]) for c, s in enumerate(row)]
        rows.append(torch.stack(logits))
    new = list(t)
    for c in set(labels.tolist()):
        found = [float(row[c]) for row, y in zip(cosine, labels.tolist(), strict=True) if y == c]
        new[c] = 0.99 * t[c] + 0.01 * sum(found) / len(found)
    return cross_entropy(scale * torch.stack(rows), labels), new


def cosface(z: Tensor, labels: Tensor, proxies: Tensor, scale: float = 64, width: float = 0.35) -> Tensor:
    terms = []
    for row, y in zip(directions(z) @ directions(proxies).T, labels.tolist(), strict=True):
        rest = sum((scale * s).exp() for c, s in enumerate(row) if c != y)
        terms.append((1 + (-scale * (row[y] - width)).exp() * rest).log())
    return mean(terms)


def arcface(z: Tensor, labels: Tensor, proxies: Tensor, scale: float = 64, angle: float = 0.5) -> Tensor:
    cosine = directions(z) @ directions(proxies).T
    own = torch.eye(len(proxies), dtype=torch.bool)[labels]
    return cross_entropy(scale * torch.where(own, turned(cosine, angle), cosine), labels)


def proxy_nca_pp(z: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    """The argument alpha=9 is never used: the temperature is 1."""
    return cross_entropy(-2 * (1 - directions(z) @ directions(proxies).T), labels)


def sup_con(z: Tensor, temperature: float = 0.1) -> Tensor:
    """(classes, views, D): for every ordered pair of views a cross-entropy; views squared is the divisor."""
    classes, views, _ = z.shape
    f = z / z.norm(dim=-1, keepdim=True)
    total = torch.zeros((), dtype=z.dtype)
    for i in range(views):
        for j in range(views):
            for a in range(classes if i != j else 0):
                across = [f[a, i] @ f[b, j] / temperature for b in range(classes)]
                within = [f[a, i] @ f[b, i] / temperature for b in range(classes) if b != a]
                total = total + (torch.stack(across + within).logsumexp(0) - across[a]) / classes
    return total / views**2


def poincare_mean(x: Tensor, c: float) -> Tensor:
    """Mean over the first axis by way of the Klein model (hyptorch/pmath.py:466)."""
    klein = 2 * x / (1 + c * x.pow(2).sum(-1, keepdim=True))
    gamma = 1 / torch.sqrt(1 - c * klein.pow(2).sum(-1, keepdim=True))
    mean = (gamma * klein).sum(0) / gamma.sum(0)
    return mean / (1 + torch.sqrt(1 - c * mean.pow(2).sum(-1, keepdim=True)))


def triplet(z: Tensor, labels: Tensor, width: float = 0.05) -> Tensor:
    """pytorch-metric-learning's, on cosines, with its batch-hard miner; the mean counts violated triplets only."""
    f, hinges = directions(z), []
    for a in range(len(f)):
        same, other = others(labels, a)
        s = f @ f[a]
        near, far = min(same, key=lambda p: float(s[p])), max(other, key=lambda n: float(s[n]))
        hinges.append((s[far] - s[near] + width).relu())
    return torch.stack(hinges).sum() / sum(bool(hinge > 0) for hinge in hinges)


# --- metrics ---------------------------------------------------------------------------------------------------------


def precisions(f: Tensor, labels: Tensor) -> tuple[float, float]:
    """MAP@R and R-precision. The query is not retrieved, yet R counts it (helpers.py:297)."""
    average, plain = 0.0, 0.0
    for i in range(len(f)):
        size = int((labels == labels[i]).sum())
        order = (f @ f[i]).argsort(descending=True).tolist()
        order.remove(i)
        hits = 0
        for rank, j in enumerate(order[:size], 1):
            if labels[j] == labels[i]:
                hits += 1
                average += hits / rank / size
        plain += hits / size
    return average / len(f), plain / len(f)
