"""Plain float64 transcriptions of what the code of ooDML, DiVA and S2SD computes; no line is copied.

A keyword that names a bug or a variant of theirs switches it; its default is the released code that the paper's numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .reference_revisiting import directions, margin, mean, others

__all__ = ["Adam", "adversary", "dance", "join", "kl", "margin", "multi_similarity", "prior", "proxy_anchor", "s2sd", "verdict"]


def two_layers(network: nn.Module, x: Tensor) -> Tensor:
    """Linear, ReLU, Linear, from the weights of a `nn.Sequential`."""
    first, _, last = network
    return (x @ first.weight.T + first.bias).clamp_min(0) @ last.weight.T + last.bias


# --- DiVA ------------------------------------------------------------------------------------------------------------


def adversary(regressor: nn.Module, source: Tensor, target: Tensor, rho: float) -> Tensor:
    """One direction, before the gradients of source and target are reversed."""
    guess = directions(two_layers(regressor, directions(source)))
    products = [(t * g).square().mean() for t, g in zip(directions(target), guess, strict=True)]
    return -rho * mean(products)


def join(branches: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The test-time embedding: weighted unit vectors one after another, normalized."""
    return directions(torch.cat([w * directions(x) for w, x in zip(weights, branches, strict=True)], 1))


def inverse_density(similarity: Tensor, dim: int) -> Tensor:
    d = (2 - 2 * similarity.detach()).clamp_min(0).sqrt().clamp_min(0.5)
    return (2 - dim) * d.log() - (dim - 3) / 2 * (1 - d * d / 4).log()


def dance(query: Tensor, keys: Tensor, queue: Tensor, temperature: float = 0.01, fixed: bool = False) -> Tensor:
    """DaNCE on unit vectors. `fixed` (`--diva_fixed`) normalizes the weights per query, otherwise per key over the batch."""
    similarity = query @ queue.T
    logs = inverse_density(similarity, query.shape[1])
    beyond = (2 - 2 * similarity.detach()).sqrt() > 1.4
    rows = []
    for i in range(len(query)):
        top = logs[i].max() if fixed else logs.max()
        rows.append(torch.where(beyond[i], 0, (logs[i] - top).exp()).clamp_min(1e-45))
    weights = torch.stack(rows)
    weights = torch.stack([row / row.sum() for row in weights]) if fixed else torch.stack([c / c.sum() for c in weights.T]).T
    terms = []
    for q, k, s, w in zip(query, keys, similarity, weights, strict=True):
        logits = torch.cat([(q @ k)[None], w * s]) / temperature
        terms.append(logits.logsumexp(0) - logits[0])
    return mean(terms)


# --- S2SD ------------------------------------------------------------------------------------------------------------


def kl(source: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 / B times the sum over rows of KL(target || source); the target has no gradient."""
    total = torch.zeros((), dtype=source.dtype)
    for row, wanted in zip(source @ source.T / temperature, target.detach() @ target.detach().T / temperature, strict=True):
        p = wanted.softmax(0)
        total = total + (p * (p.log() - row.log_softmax(0))).sum()
    return total * temperature**2 / len(source)


def s2sd(
    z: Tensor,
    feature_map: Tensor,
    labels: Tensor,
    triplets: list[tuple[int, int, int]],
    targets: Sequence[nn.Module],
    betas: Sequence[Tensor],
    *,
    pool_aggr: bool,
    with_features: bool,
    or_count: bool = True,
    weight: float = 50.0,
) -> Tensor:
    """The whole loss over margin; the first of `betas` is the embedding's, the others the branches'."""
    f = directions(z)
    features = torch.stack([image.mean(0) + image.max(0).values if pool_aggr else image.mean(0) for image in feature_map])
    wide = [directions(two_layers(target, features)) for target in targets]
    own = [margin(x, labels, triplets, beta, or_count=or_count) for x, beta in zip(wide, betas[1:], strict=True)]
    total = (mean(own) + margin(f, labels, triplets, betas[0], or_count=or_count)) / 2 + weight * mean([kl(f, x) for x in wide])
    return total + weight * kl(f, directions(features)) if with_features else total


# --- Uniform Prior ---------------------------------------------------------------------------------------------------


def score(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Sigmoid of a network of three layers."""
    for number, layer in enumerate(layers):
        x = x @ layer.weight.T + layer.bias
        x = x.clamp_min(0) if number < 2 else x
    return 1 / (1 + (-x[:, 0]).exp())


def prior(layers: Sequence[nn.Linear], features: Tensor, chunk: int, weight: float) -> Tensor:
    """The network's term: minus the log of the discriminator's belief that a chunk is uniform."""
    return weight * mean([-p.log() for p in score(layers, features.reshape(-1, chunk))])


def verdict(layers: Sequence[nn.Linear], features: Tensor, uniform: Tensor, chunk: int) -> Tensor:
    """The loss of the discriminator."""
    real, fake = score(layers, uniform), score(layers, features.detach().reshape(-1, chunk))
    return mean([-p.log() for p in real]) + mean([-(1 - p).log() for p in fake])


class Adam:
    """Kingma and Ba's algorithm 1."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, betas: tuple[float, float] = (0.5, 0.999), epsilon: float = 1e-8) -> None:
        self.parameters, self.lr, self.betas, self.epsilon, self.steps = list(parameters), lr, betas, epsilon, 0
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, slopes: Sequence[Tensor]) -> None:
        self.steps += 1
        for p, m, v, slope in zip(self.parameters, self.first, self.second, slopes, strict=True):
            m.copy_(self.betas[0] * m + (1 - self.betas[0]) * slope)
            v.copy_(self.betas[1] * v + (1 - self.betas[1]) * slope**2)
            rate = m / (1 - self.betas[0] ** self.steps)
            p -= self.lr * rate / ((v / (1 - self.betas[1] ** self.steps)).sqrt() + self.epsilon)


# --- the variants of ooDML's losses ----------------------------------------------------------------------------------


def multi_similarity(f: Tensor, labels: Tensor, alpha: float = 2, beta: float = 40, base: float = 0.5, epsilon: float = 0.1) -> Tensor:
    """An anchor counts among its positives, so that it enters if a negative is more similar than 1 - epsilon."""
    pulls, pushes = [], []
    for a in range(len(f)):
        same, other = others(labels, a)
        s = f @ f[a]
        weak = [p for p in [*same, a] if s[p] - epsilon < max(s[n] for n in other)]
        hard = [n for n in other if s[n] + epsilon > min(s[p] for p in same)]
        if weak:
            pulls.append((1 + sum((-alpha * (s[p] - base)).exp() for p in weak)).log() / alpha)
        if hard:
            pushes.append((1 + sum((beta * (s[n] - base)).exp() for n in hard)).log() / beta)
    return mean(pulls) + mean(pushes)


def proxy_anchor(z: Tensor, labels: Tensor, proxies: Tensor, alpha: float = 32, delta: float = 0.1) -> Tensor:
    """The first mean runs over the batch: a class counts as often as it has samples."""
    x, p = directions(z), directions(proxies)
    pull = []
    for y in labels.tolist():
        own = [(-alpha * (x[i] @ p[y] - delta)).exp() for i in range(len(x)) if labels[i] == y]
        pull.append((1 + sum(own)).log())
    push = []
    for c in range(len(p)):
        rest = [(alpha * (x[i] @ p[c] + delta)).exp() for i in range(len(x)) if labels[i] != c]
        push.append((1 + sum(rest)).log())
    return mean(pull) + mean(push)


def within_class(labels: Tensor) -> dict[tuple[int, int, int], float]:
    """Probability of every triplet of DiVA's intra-class miner: a class uniformly, then three samples of it with replacement."""
    chance = {}
    classes = labels.unique().tolist()
    for label in classes:
        rows = [i for i in range(len(labels)) if labels[i] == label]
        for a in rows:
            for p in rows:
                for n in rows:
                    chance[a, p, n] = 1 / len(classes) / len(rows) ** 3
    assert math.isclose(sum(chance.values()), 1)
    return chance
