"""A metric of each dataset alone."""

from __future__ import annotations

from unimetric.geometry.space import Space
from unimetric.spec import bind


def per_source(space: Space, *, metric: str = "recall(k=1)") -> dict[str, float]:
    """A metric of each dataset alone, with its own queries and its own gallery.

    Towards universal metric learning (PUMA, Kim et al. 2023): "dataset-specific accuracy".

    Args:
        space: the embeddings of all datasets, with `source`.
        metric: a metric over queries that gives one number.
    """
    measure, arguments = bind("metrics", metric)
    if space.sources == 1:  # it has been searched already
        return {space.source_names[0]: measure(space, **arguments)}
    parts = {name: space.within(space.source == number) for number, name in enumerate(space.source_names)}
    return {name: measure(part, **arguments) for name, part in parts.items() if part.queries}
