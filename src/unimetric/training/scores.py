"""Scores of the network before and after training, and the gain with its interval."""

from __future__ import annotations

from typing import Any

import torch

from unimetric.config import better
from unimetric.geometry.pair_scores import FEWEST
from unimetric.geometry.space import Average, Space
from unimetric.metrics import bootstrap, measure, totals_by_class
from unimetric.spec import bind

#: Value of a metric, and the sums and numbers of queries per class that it is the mean of, if it is a mean over queries.
Score = dict[str, Any]


def score_of(space: Space, metric: str) -> Score:
    """Return the value of a metric, with its sums by class if it is a mean over queries.

    Args:
        space: Embeddings. Neighbors that other metrics have searched are not searched again.
        metric: Metric spec string.
    """
    part, arguments = bind("metrics", metric)
    value = part(space, **arguments)
    if not isinstance(value, Average):
        numbers = list(measure(space, [metric]).values())
        return {"value": sum(numbers) / max(1, len(numbers))}
    total, count = totals_by_class(value)
    return {"value": float(value), "total": [round(each, 6) for each in total.tolist()], "count": count.to(torch.int64).tolist()}


def compare_scores(before: Score, after: Score, metric: str) -> dict[str, Any]:
    """Return the gain of one score over another; positive if the second one is better.

    Args:
        before: Score of the untrained network.
        after: Score of the trained network on the same queries.
        metric: Metric spec string.

    Returns:
        `metric`, `untrained`, `trained`, `gain`, and `from` and `to`: a 95% bootstrap interval over whole classes, both networks on
        the same drawn classes. There is none if the metric is not a mean over queries, or if there are fewer than eight classes.
    """
    sign = -1 if better(metric) == "lower" else 1
    found = {"metric": metric, "untrained": before["value"], "trained": after["value"], "gain": sign * (after["value"] - before["value"])}
    if len(before.get("count", ())) >= FEWEST and before["count"] == after.get("count"):
        totals = [torch.tensor(each["total"], dtype=torch.float64) for each in (before, after)]
        low, high = bootstrap(sign * (totals[1] - totals[0]), torch.tensor(before["count"], dtype=torch.float64))
        found |= {"from": low, "to": high}
    return found


def format_gain(gain: dict[str, Any]) -> str:
    """Format the gain of `compare_scores`, with its interval.

    >>> format_gain({"metric": "recall(k=1)", "untrained": 0.5, "trained": 0.52, "gain": 0.02, "from": -0.01, "to": 0.05})
    'recall(k=1) 0.5000 -> 0.5200, +0.0200 (95% interval -0.0100 to +0.0500)'
    """
    text = f"{gain['metric']} {gain['untrained']:.4f} -> {gain['trained']:.4f}, {gain['gain']:+.4f}"
    return f"{text} (95% interval {gain['from']:+.4f} to {gain['to']:+.4f})" if "from" in gain else text
