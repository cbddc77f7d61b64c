"""Plain float64 transcriptions of what the code of Roth et al. (Revisiting) and of Proxy-Anchor computes.

Written from the papers and from what the code does; no line is copied. f are unit embeddings (their networks normalize), g raw ones. A
keyword that names a bug of theirs switches it on or off; its default is their code as released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import scipy.linalg
import torch
from scipy.spatial.distance import pdist
from scipy.stats import wasserstein_distance
from torch import Tensor

Triplet = tuple[int, int, int]


def mean(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean()


def others(labels: Tensor, a: int) -> tuple[list[int], list[int]]:
    """The positives of an anchor without itself, and its negatives."""
    same = [j for j in range(len(labels)) if labels[j] == labels[a] and j != a]
    return same, [j for j in range(len(labels)) if labels[j] != labels[a]]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return mean([torch.logsumexp(row, 0) - row[y] for row, y in zip(logits, labels.tolist(), strict=True)])


def directions(x: Tensor) -> Tensor:
    return torch.stack([row / row.norm() for row in x])


# --- losses on triplets and pairs ------------------------------------------------------------------------------------


def triplet(f: Tensor, triplets: list[Triplet], margin: float = 0.2) -> Tensor:
    return mean([((f[a] - f[p]).square().sum() - (f[a] - f[n]).square().sum() + margin).relu() for a, p, n in triplets])


def variance(x: Tensor) -> Tensor:
    return (x - x.mean()).square().sum() / (len(x) - 1)


def snr(f: Tensor, triplets: list[Triplet], margin: float = 0.2, penalty: float = 0.005) -> Tensor:
    hinges = [((variance(f[a] - f[p]) - variance(f[a] - f[n])) / variance(f[a]) + margin).relu() for a, p, n in triplets]
    active = sum(bool(hinge > 0) for hinge in hinges)
    return torch.stack(hinges).sum() / active + penalty * mean([f[a].sum().abs() for a, _, _ in triplets])


def multi_similarity(
    f: Tensor, labels: Tensor, alpha: float = 2, beta: float = 40, base: float = 0.5, epsilon: float = 0.1, kept_only: bool = True
) -> Tensor:
    """`kept_only`: the mean counts anchors that keep pairs; otherwise all, as in the code of Wang et al."""
    terms = []
    for a in range(len(f)):
        same, other = others(labels, a)
        s = f @ f[a]
        hard = [n for n in other if s[n] + epsilon > min(s[p] for p in same)]
        weak = [p for p in same if s[p] - epsilon < max(s[n] for n in other)]
        if hard and weak:
            pull = (1 + sum((-alpha * (s[p] - base)).exp() for p in weak)).log() / alpha
            push = (1 + sum((beta * (s[n] - base)).exp() for n in hard)).log() / beta
            terms.append(pull + push)
    return torch.stack(terms).sum() / (len(terms) if kept_only else len(f))


def n_pair(g: Tensor, labels: Tensor, positives: list[int], penalty: float = 0.005, divisor: float = 1.0) -> Tensor:
    g = g / divisor  # 4 for BN-Inception
    terms = []
    for a, p in enumerate(positives):
        _, other = others(labels, a)
        terms.append((1 + sum((g[a] @ g[n] - g[a] @ g[p]).exp() for n in other)).log())
    return mean(terms) + penalty * mean([row.norm() for row in g])


def angular(g: Tensor, labels: Tensor, positives: list[int], alpha: float = 45, weight: float = 2, penalty: float = 0.005) -> Tensor:
    f, square = directions(g), math.tan(math.radians(alpha)) ** 2
    raw, angles = [], []
    for a, p in enumerate(positives):
        _, other = others(labels, a)
        raw.append((1 + sum((g[a] @ g[n] - g[a] @ g[p]).clamp(-50, 50).exp() for n in other)).log())
        angle = [4 * square * (f[a] + f[p]) @ f[n] - 2 * (1 + square) * f[a] @ f[p] for n in other]
        angles.append((1 + sum(x.exp() for x in angle)).log())
    return mean(raw) + weight * mean(angles) + penalty * mean([row.norm() for row in g])


def histogram(f: Tensor, labels: Tensor, nodes: int, by_equality: bool = True) -> Tensor:
    """`by_equality`: a pair adds to a node only if two floats, computed in different ways, are equal (histogram.py:94)."""
    width = 2 / (nodes - 1)
    grid = np.linspace(-1, 1, nodes)
    counts: dict[bool, list[Tensor]] = {same: [torch.zeros((), dtype=f.dtype) for _ in range(nodes)] for same in (True, False)}
    pairs = {True: 0, False: 0}
    for i, j in combinations(range(len(f)), 2):
        s, same = f[i] @ f[j], bool(labels[i] == labels[j])
        pairs[same] += 1
        lower = int((float(s) + 1) / width)
        start = lower * width - 1
        if not by_equality or start == grid[lower]:
            counts[same][lower] = counts[same][lower] + (grid[lower] + width - s) / width
        if not by_equality or start == grid[lower + 1] - width:
            counts[same][lower + 1] = counts[same][lower + 1] + (s - grid[lower + 1] + width) / width
    total, rank = torch.zeros((), dtype=f.dtype), torch.zeros((), dtype=f.dtype)
    for r in range(nodes):
        rank = rank + counts[True][r] / pairs[True]
        total = total + counts[False][r] / pairs[False] * rank
    return total


def margin(f: Tensor, labels: Tensor, triplets: list[Triplet], beta: Tensor, width: float = 0.2, or_count: bool = True) -> Tensor:
    """`or_count`: the sum of two boolean tensors is a logical or, so that triplets are counted instead of pairs (margin.py:62)."""
    total, count = torch.zeros((), dtype=f.dtype), 0
    for a, p, n in triplets:
        pull = (((f[a] - f[p]).square().sum() + 1e-8).sqrt() - beta[labels[a]] + width).relu()
        push = (beta[labels[a]] - ((f[a] - f[n]).square().sum() + 1e-8).sqrt() + width).relu()
        total = total + pull + push
        count += bool(pull > 0 or push > 0) if or_count else bool(pull > 0) + bool(push > 0)
    return total / count if count else total


def shifted_distance(x: Tensor, y: Tensor) -> Tensor:
    """torch's PairwiseDistance adds 1e-6 to every coordinate of the difference."""
    return (x - y + 1e-6).square().sum().sqrt()


def contrastive(f: Tensor, triplets: list[Triplet], near: float = 0.0, far: float = 1.0) -> Tensor:
    pull = mean([(shifted_distance(f[a], f[p]) - near).relu() for a, p, _ in triplets])
    return pull + mean([(far - shifted_distance(f[a], f[n])).relu() for a, _, n in triplets])


def generalized_lifted(g: Tensor, labels: Tensor, width: float = 1.0, penalty: float = 0.005, last_axis: bool = False) -> Tensor:
    """`last_axis`: under torch 2, PairwiseDistance sums over samples and leaves one entry per dimension (lifted.py:34)."""
    terms = []
    for a in range(len(g)):
        same, other = others(labels, a)
        if last_axis:
            near, far = ((g[a] - g[chosen] + 1e-6).square().sum(0).sqrt() for chosen in (same, other))
        else:
            near, far = (torch.stack([shifted_distance(g[a], g[j]) for j in chosen]) for chosen in (same, other))
        terms.append((near.logsumexp(0) + (width - far).logsumexp(0)).relu())
    return mean(terms) + penalty * mean([row.norm() for row in g])


def quadruplet(
    f: Tensor, triplets: list[Triplet], fourth: list[int], first: float = 0.2, second: float = 0.2, broadcast: bool = True
) -> Tensor:
    """`broadcast`: (B, 1, D) minus (B, D) pairs every negative with every fourth sample (quadruplet.py:44)."""
    near = [(f[a] - f[p]).norm() for a, p, _ in triplets]
    terms = [(d - (f[a] - f[n]).norm() + first).relu() for d, (a, _, n) in zip(near, triplets, strict=True)]
    pairs = []
    for i, (_, _, n) in enumerate(triplets):
        for m in fourth if broadcast else [fourth[i]]:
            pairs.append((near[i] - (f[n] - f[m]).norm() + second).relu())
    return mean(terms) + mean(pairs)


# --- losses with class directions ------------------------------------------------------------------------------------


def proxy_nca(z: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    x, p, terms = 3 * directions(z), 3 * directions(proxies), []
    for i, y in enumerate(labels.tolist()):
        distance = torch.stack([(x[i] - row).square().sum() for row in p])
        terms.append(distance[y] + torch.stack([-d for c, d in enumerate(distance) if c != y]).logsumexp(0))
    return mean(terms)


def softmax(f: Tensor, labels: Tensor, proxies: Tensor, temperature: float = 0.05) -> Tensor:
    return cross_entropy(f @ directions(proxies).T / temperature, labels)


def arcface(f: Tensor, labels: Tensor, proxies: Tensor, scale: float = 16, angle: float = 0.5, on_every_logit: bool = False) -> Tensor:
    """`on_every_logit`: until commit 703d189, after the publication, the margin was added to all logits of a row."""
    cosine = (f @ directions(proxies).T).clamp(1e-10, 1 - 1e-10)
    rows = []
    for row, y in zip(cosine, labels.tolist(), strict=True):
        offset = torch.cos(torch.acos(row[y]) + angle) - row[y]
        rows.append(torch.stack([s + offset if c == y or on_every_logit else s for c, s in enumerate(row)]))
    return cross_entropy(scale * torch.stack(rows), labels)


def soft_triple(
    f: Tensor,
    labels: Tensor,
    centers: Tensor,
    scale: float = 8,
    delta: float = 0.01,
    gamma: float = 0.1,
    tau: float = 0.2,
    wrong_axes: bool = True,
) -> Tensor:
    """`wrong_axes`: centers are normalized per dimension, and the softmax over classes multiplies by gamma (softtriplet.py:53,56)."""
    classes, count, _ = centers.shape
    flat = centers.flatten(0, 1)
    w = (directions(flat.T).T if wrong_axes else directions(flat)).view_as(centers)
    s = torch.stack([torch.stack([torch.stack([x @ w[c, k] for k in range(count)]) for c in range(classes)]) for x in f])  # (B, C, K)
    weight = (gamma * s).softmax(1) if wrong_axes else (s / gamma).softmax(2)
    lowered = (weight * s).sum(2) - delta * torch.eye(classes, dtype=f.dtype)[labels]
    apart = [(2.00001 - 2 * w[c, k] @ w[c, j]).sqrt() for c in range(classes) for k, j in combinations(range(count), 2)]
    return cross_entropy(scale * lowered, labels) + tau * torch.stack(apart).sum() / (classes * count * (count - 1))


def proxy_anchor(z: Tensor, labels: Tensor, proxies: Tensor, alpha: float = 32, delta: float = 0.1, epsilon: float = 1e-12) -> Tensor:
    """Of Proxy-Anchor's own repository; `epsilon` is added under the root of a norm. PUMA's has none."""
    x, p = (rows / (rows.square().sum(1, keepdim=True) + epsilon).sqrt() for rows in (z, proxies))
    pull, push = [], []
    for c in range(len(p)):
        own = [(-alpha * (x[i] @ p[c] - delta)).exp() for i in range(len(x)) if labels[i] == c]
        rest = [(alpha * (x[i] @ p[c] + delta)).exp() for i in range(len(x)) if labels[i] != c]
        if own:
            pull.append((1 + sum(own)).log())
        push.append((1 + sum(rest)).log())
    return mean(pull) + mean(push)


# --- miners: the probability of each choice --------------------------------------------------------------------------


def distance_matrix(f: Tensor) -> np.ndarray:
    x = f.detach().numpy()
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))


def even(chosen: Sequence[int], count: int) -> np.ndarray:
    weights = np.zeros(count)
    weights[list(chosen)] = 1 / len(chosen)
    return weights


def distance_weights(f: Tensor, labels: Tensor, a: int, lower: float = 0.5) -> np.ndarray:
    """P(n | a). The upper cutoff of 1.4 is commented out in the code."""
    dim, weights = f.shape[1], np.zeros(len(f))
    for n in others(labels, a)[1]:
        d = max(lower, float((f[a] - f[n]).norm()))
        weights[n] = math.exp((2 - dim) * math.log(d) - (dim - 3) / 2 * math.log(1 - d * d / 4))
    return weights / weights.sum()


def softhard(f: Tensor, labels: Tensor, a: int) -> tuple[np.ndarray, np.ndarray]:
    """P(p | a) and P(n | a)."""
    d, (same, other) = distance_matrix(f)[a], others(labels, a)
    far = [p for p in same if d[p] > min(d[n] for n in other)]
    near = [n for n in other if d[n] < max(d[p] for p in same)]
    return even(far or same, len(f)), even(near or other, len(f))


def semihard(f: Tensor, labels: Tensor, a: int, p: int, width: float = 0.2) -> np.ndarray:
    """P(n | a, p)."""
    d, (_, other) = distance_matrix(f)[a], others(labels, a)
    return even([n for n in other if d[p] < d[n] < d[p] + width] or other, len(f))


def random_triplets(labels: Tensor) -> list[Triplet]:
    """Every triplet of the batch; the code draws B of them without replacement."""
    return [(a, p, n) for a in range(len(labels)) for p in others(labels, a)[0] for n in others(labels, a)[1]]


# --- metrics ---------------------------------------------------------------------------------------------------------


def neighbors(f: Tensor) -> np.ndarray:
    """(N, N - 1): others by distance; the nearest, which is the query itself, is dropped."""
    return distance_matrix(f).argsort(1, kind="stable")[:, 1:]


def recall(f: Tensor, labels: Tensor, k: int) -> float:
    found = labels.numpy()[neighbors(f)[:, :k]]
    return sum(labels[i].item() in found[i] for i in range(len(f))) / len(f)


def average_precision(f: Tensor, labels: Tensor, depth: int | None) -> float:
    """`mAP_c` without a depth, `mAP_1000` with 1000. The divisor counts the query."""
    near, total = labels.numpy()[neighbors(f)], 0.0
    for i in range(len(f)):
        size = int((labels == labels[i]).sum())
        hits = 0
        for rank, label in enumerate(near[i][: size if depth is None else depth], 1):
            if label == labels[i]:
                hits += 1
                total += hits / rank / size
    return total / len(f)


def pi_intra(f: Tensor, labels: Tensor, first_two: bool = True) -> float:
    """`first_two`: a class of one image counts as the wider one of the first two classes, not as the widest class (dists.py:29)."""
    values = []
    for label in labels.unique():
        rows = [row for row, y in zip(f, labels, strict=True) if y == label]
        distances = [1 - float(x @ y / x.norm() / y.norm()) for x in rows for y in rows]
        values.append(sum(distances) / (len(rows) ** 2 - len(rows)) if len(rows) > 1 else math.nan)
    widest = max(values[:2]) if first_two else max(value for value in values if not math.isnan(value))
    return sum(widest if math.isnan(value) else value for value in values) / len(values)


def pi_inter(f: Tensor, labels: Tensor) -> float:
    centers = [f[labels == label].mean(0) for label in labels.unique()]
    count = len(centers)
    distances = [1 - float(x @ y / x.norm() / y.norm()) for x in centers for y in centers]
    return sum(distances) / (count * count - count)


def spectral_decay(f: Tensor, mode: int, dropped_end: int = 0) -> float:
    """`rho_spectrum@mode`; on a CPU the code computes one singular value fewer (`dropped_end=1`)."""
    s = np.linalg.svd(f.detach().numpy(), compute_uv=False)
    s = s[abs(mode) - 1 : len(s) - dropped_end]
    p, u = s / s.sum(), np.full(len(s), 1 / len(s))
    first, second = (p, u) if mode < 0 else (u, p)
    return float(sum(x * math.log(x / y) for x, y in zip(first, second, strict=True)))


def information(labels: Tensor, clusters: Tensor) -> float:
    """Normalized mutual information with the arithmetic mean, as scikit-learn's."""
    count, pairs = len(labels), list(zip(labels.tolist(), clusters.tolist(), strict=True))
    share = {pair: pairs.count(pair) / count for pair in set(pairs)}
    p = {y: sum(value for (other, _), value in share.items() if other == y) for y, _ in share}
    q = {c: sum(value for (_, other), value in share.items() if other == c) for _, c in share}
    mutual = sum(value * math.log(value / p[y] / q[c]) for (y, c), value in share.items())
    return 2 * mutual / (-sum(x * math.log(x) for x in p.values()) - sum(x * math.log(x) for x in q.values()))


def f1(labels: Tensor, clusters: Tensor) -> float:
    pairs = list(combinations(range(len(labels)), 2))
    same_class = {pair for pair in pairs if labels[pair[0]] == labels[pair[1]]}
    same_cluster = {pair for pair in pairs if clusters[pair[0]] == clusters[pair[1]]}
    both = len(same_class & same_cluster)
    precision, reach = both / len(same_class), both / len(same_cluster)
    return 2 * precision * reach / (precision + reach)


def gallery_recall(query: Tensor, query_labels: Tensor, gallery: Tensor, gallery_labels: Tensor, k: int) -> float:
    """Proxy-Anchor on In-Shop: fewer than k items of other classes are closer than the closest item of the query's class."""
    hits = 0
    for x, y in zip(directions(query), query_labels, strict=True):
        similarity = directions(gallery) @ x
        best = similarity[gallery_labels == y].max()
        hits += int((similarity[gallery_labels != y] > best).sum()) < k
    return hits / len(query)


# --- samplers --------------------------------------------------------------------------------------------------------


def frechet_cost(big: np.ndarray, part: np.ndarray) -> float:
    offset = 1e-8 * np.eye(big.shape[1])
    first, second = np.cov(big, rowvar=False), np.cov(part, rowvar=False)
    root = scipy.linalg.sqrtm((first + offset) @ (second + offset)).real
    return ((big.mean(0) - part.mean(0)) ** 2).sum() + np.trace(first) + np.trace(second) - 2 * np.trace(root)


def distance_cost(big: np.ndarray, part: np.ndarray, bins: int = 50) -> float:
    """scipy's Wasserstein distance of the bin heights as if they were samples, and of the moments."""
    whole = pdist(big)
    heights = [np.histogram(values, bins=bins, range=(whole.min(), whole.max()))[0] for values in (whole, pdist(part))]
    h, other = (height / height.sum() for height in heights)
    moments = np.linalg.norm(big.mean(0) - part.mean(0)) + np.linalg.norm(big.std(0) - part.std(0))
    return moments + 75 * (wasserstein_distance(h, other) + wasserstein_distance(other, h))


def greedy_centers(points: np.ndarray, first: int, count: int) -> list[int]:
    """k-center greedy. Distances start as the norms of the rows of the matrix of squared distances, which no row exceeds."""
    square = np.array([[((x - y) ** 2).sum() for y in points] for x in points])
    nearest, chosen = np.array([math.sqrt((row**2).sum()) for row in square]), [first]
    while len(chosen) < count:
        nearest = np.minimum(nearest, square[:, chosen[-1]])
        chosen.append(int(nearest.argmax()))
    return chosen


def positives_per_anchor(classes: int, batch_size: int, n: int) -> tuple[float, float]:
    """Expected positives per anchor, and distinct classes per batch, where both classes and images are drawn with replacement."""
    draws = batch_size // n
    return n - 1 + n * (draws - 1) / classes, classes * (1 - (1 - 1 / classes) ** draws)


# --- augmentation ----------------------------------------------------------------------------------------------------


def gray(image: Tensor) -> Tensor:
    return (0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]).expand_as(image)


def gray_then_jitter(image: Tensor, brightness: float, contrast: float) -> Tensor:
    """Grayscale comes first, so that saturation and hue change nothing (basic_dataset_scaffold.py:40)."""
    image = (gray(image) * brightness).clamp(0, 1)
    return (contrast * image + (1 - contrast) * image.mean()).clamp(0, 1)
