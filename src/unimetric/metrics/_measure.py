"""Evaluate several metrics of one space by one search, with confidence intervals."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch

from unimetric.errors import UnimetricError, closest
from unimetric.geometry.space import Average, Space
from unimetric.spec import bind, find, parse


def measure(space: Space, texts: Sequence[str]) -> dict[str, float]:
    """Several metrics of one space from one search: `measure(space, ["recall(k=1)", "map_at_r"])`.

    Every text is read and checked before anything is computed. A metric that gives several numbers has them under `text/key`.

    Args:
        space: the embeddings.
        texts: metrics, as a config names them.
    """
    calls = [(text, *bind("metrics", text)) for text in texts]
    for _, metric, arguments in calls:
        space.expect(_depth(space, metric, arguments))
    values: dict[str, float] = {}
    for text, metric, arguments in calls:
        value = metric(space, **arguments)
        values |= {f"{text}/{key}": number for key, number in value.items()} if isinstance(value, dict) else {text: value}
    return {text: float(value) for text, value in values.items()}  # plain numbers: a mean holds its terms, which nobody needs any more


def explain(text: str) -> str:
    """What a metric says, in one plain sentence: the first paragraph of its docstring.

    >>> explain("recall(k=4)")
    "How often at least one of the k nearest neighbours is of the query's own class."
    """
    paragraph = (inspect.getdoc(find("metrics", parse(text).name)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def interval(space: Space, text: str, *, level: float = 0.95, method: str = "bootstrap", draws: int = 1000) -> tuple[float, float]:
    """Between which values a metric would lie if other pictures had been taken: a confidence interval.

    For metrics that are means over queries. "bootstrap" draws whole classes again and again, since pictures of one class fail together
    (Efron and Tibshirani, 1993; percentiles). "wilson" is for yes-or-no metrics such as recall, needs no draws, and takes
    queries to be independent, so that it is too narrow where they are not (Wilson, 1927).

    Args:
        space: the embeddings.
        text: the metric.
        level: how often such an interval holds the true value.
        method: "bootstrap" or "wilson".
        draws: how often the bootstrap draws; numbered by the seed of the space.
    """
    if method not in ("bootstrap", "wilson"):
        raise UnimetricError(f"no interval by `{method}`", closest(method, ("bootstrap", "wilson")))
    metric, arguments = bind("metrics", text)
    value = metric(space, **arguments)
    if not isinstance(value, Average):
        raise UnimetricError(f"`{text}` is not a mean over queries, so it has no interval", "ask for that of recall, map_at_r, ...")
    if method == "wilson":
        if not ((value.each == 0) | (value.each == 1)).all():
            raise UnimetricError(f"`{text}` is not a share of queries, so Wilson's interval does not hold", "use method='bootstrap'")
        z = NormalDist().inv_cdf((1 + level) / 2)
        share = z * z / len(value.each)
        middle, half = value + share / 2, math.sqrt(share * (value * (1 - value) + share / 4))
        return max(0.0, (middle - half) / (1 + share)), min(1.0, (middle + half) / (1 + share))
    each, classes = value.each.cpu(), value.classes.cpu().unique(return_inverse=True)[1]
    count = torch.bincount(classes).to(torch.float64)
    total = torch.zeros_like(count).index_add_(0, classes, each)
    dice = torch.Generator().manual_seed(space.seed)
    means = torch.empty(draws, dtype=torch.float64)
    for draw in range(draws):
        drawn = torch.randint(len(count), (len(count),), generator=dice)
        means[draw] = total[drawn].sum() / count[drawn].sum()
    low, high = means.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


class _Seen(Exception):
    """A metric has said how deep it looks, and need not be computed yet."""


class _Glance:
    """Stands in for a space to learn how deep a metric looks: it knows the space's numbers, and answers nothing that costs."""

    def __init__(self, space: Space) -> None:
        self.space, self.depth = space, 0

    def average(self, k: int, value: Any) -> float:
        self.depth = k
        raise _Seen

    def __getattr__(self, name: str) -> int:
        value = getattr(self.space, name)
        if isinstance(value, int):
            return value
        raise _Seen


def _depth(space: Space, metric: Any, arguments: dict[str, Any]) -> int:
    glance = _Glance(space)
    try:
        metric(glance, **arguments)
    except _Seen:
        return glance.depth
    return 0
