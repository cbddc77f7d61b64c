"""Evaluate several metrics of one space with one search, with confidence intervals."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.errors import UnimetricError, closest, locating
from unimetric.foreign import completed
from unimetric.geometry.pair_scores import FEWEST, quantiles
from unimetric.geometry.space import Average, Space
from unimetric.geometry.wilson import wilson
from unimetric.spec import bind, find, parse


def measure(space: Space, texts: Sequence[str]) -> dict[str, float]:
    """Evaluate several metrics of one space with one search.

        measure(space, ["recall(k=1)", "map_at_r"])

    Every spec string is parsed and checked before anything is computed. The values of a metric that
    returns several are stored under `text/key`.

    Args:
        space: Embeddings.
        texts: Spec strings of metrics, as in a config.
    """
    check_list(texts)
    calls = [(text, *bind("metrics", text)) for text in texts]
    for _, metric, arguments in calls:
        space.expect(completed("metrics", metric).depth(space, **arguments))
    values: dict[str, float] = {}
    for text, metric, arguments in calls:
        with locating(f"`{text}`"):
            value = metric(space, **arguments)
        # Convert to plain numbers, because an `Average` also stores its terms.
        if isinstance(value, dict):
            values |= {f"{text}/{key}": float(number) for key, number in value.items()}
        else:
            values[text] = float(value)
    return values


def check_list(texts: Sequence[str]) -> None:
    """Raise an error for one text instead of a list, which would be read letter by letter."""
    if isinstance(texts, str):
        raise UnimetricError(f"metrics must be a list, got `{texts}`", f"use `{[text.strip() for text in texts.split(';')]}`")


def check_roles(space: Space, texts: Sequence[str]) -> None:
    """Raise an error if labels, queries and gallery do not suffice for a metric.

    Reads no embedding, so it needs none: call it before images are read.

    Args:
        space: Space of any points.
        texts: Spec strings of metrics.
    """
    for text in texts:
        metric, arguments = bind("metrics", text)
        with locating(f"`{text}`"):
            completed("metrics", metric).check(space, **arguments)


def explain(text: str) -> str:
    """Return the first paragraph of a metric's docstring, which explains it in one sentence.

    >>> explain("recall(k=4)")
    'Fraction of queries with a match among the k nearest neighbors.'
    """
    paragraph = (inspect.getdoc(find("metrics", parse(text).name)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def interval(space: Space, text: str, *, level: float = 0.95, method: str = "bootstrap", draws: int = 1000) -> tuple[float, float]:
    """Return a confidence interval of a metric over the choice of images.

    Only for metrics that are means over queries. "bootstrap" resamples whole classes, because
    errors within a class are correlated (Efron and Tibshirani, 1993; percentiles). Fewer than eight
    classes have no such interval: it would be too narrow. "wilson" is for
    metrics of 0 or 1 per query, such as recall, and needs no draws. It assumes independent queries,
    and is too narrow if they are not (Wilson, 1927).

    Args:
        space: Embeddings.
        text: Spec string of the metric.
        level: Confidence level.
        method: "bootstrap" or "wilson".
        draws: Number of bootstrap draws, seeded by the seed of the space.
    """
    if method not in ("bootstrap", "wilson"):
        raise UnimetricError(f"unknown interval method `{method}`", closest(method, ("bootstrap", "wilson")))
    if not 0 < level < 1:
        raise UnimetricError(f"`level` must be above 0 and below 1, got {level}", "use 0.95")
    metric, arguments = bind("metrics", text)
    with locating(f"`{text}`"):
        value = metric(space, **arguments)
    if not isinstance(value, Average):
        raise UnimetricError(f"an interval requires a mean over queries, got `{text}`", "use recall, map_at_r, ...")
    if method == "wilson":
        if not ((value.each == 0) | (value.each == 1)).all():
            raise UnimetricError(f"Wilson's interval requires a fraction of queries, got `{text}`", "use `method='bootstrap'`")
        return wilson(value, len(value.each), level)
    total, count = totals_by_class(value)
    if len(count) < FEWEST:
        raise UnimetricError(
            f"an interval over classes needs queries of at least {FEWEST} classes, got {len(count)}", "use `method='wilson'` for recall"
        )
    return bootstrap(total, count, level=level, draws=draws, seed=space.seed)


def totals_by_class(value: Average) -> tuple[Float[Tensor, "C"], Float[Tensor, "C"]]:
    """Return the sums of the terms of a mean over queries, and their numbers, by class."""
    each, classes = value.each.cpu(), value.classes.cpu().unique(return_inverse=True)[1]
    count = torch.bincount(classes).to(torch.float64)
    return torch.zeros_like(count).index_add_(0, classes, each.to(torch.float64)), count


def bootstrap(
    total: Float[Tensor, "C"], count: Float[Tensor, "C"], *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return a confidence interval of `total.sum() / count.sum()` over the choice of classes.

    For the difference between two models, pass the difference of their totals: both are then drawn on the same classes.

    Args:
        total: Sum over the queries of each class.
        count: Number of queries of each class.
        level: Confidence level.
        draws: Number of draws.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    means = torch.empty(draws, dtype=torch.float64)
    for draw in range(draws):
        drawn = torch.randint(len(count), (len(count),), generator=generator)
        means[draw] = total[drawn].sum() / count[drawn].sum()
    return quantiles(means, level)
