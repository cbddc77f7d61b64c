"""A metric of each dataset alone."""

from __future__ import annotations

from unimetric import kinds
from unimetric.foreign import completed
from unimetric.geometry.space import Space
from unimetric.spec import bind


def inner_depth(space: Space, *, metric: str) -> int:
    """Return the depth of the inner metric if it reads this space, and not a part of it."""
    measure, arguments = bind("metrics", metric)
    return completed("metrics", measure).depth(space, **arguments) if space.sources == 1 else 0


def divide(space: Space) -> dict[str, Space]:
    """Return the space of each dataset with queries."""
    if space.sources == 1:  # reuse the search of the whole space
        return {space.source_names[0]: space}
    parts = {name: space.within(space.source == number) for number, name in enumerate(space.source_names)}
    return {name: part for name, part in parts.items() if part.queries}


def check_parts(space: Space, *, metric: str) -> None:
    """Raise an error if the labels or roles of a dataset do not suffice for the inner metric."""
    measure, arguments = bind("metrics", metric)
    for part in divide(space).values():
        completed("metrics", measure).check(part, **arguments)


@kinds.metric(depth=inner_depth, needs=check_parts)
def per_source(space: Space, *, metric: str = "recall(k=1)") -> dict[str, float]:
    """Metric of each dataset alone, with its queries and its gallery.

    Reference:
        Universal metric learning with parameter-efficient transfer learning (Kim et al., arXiv 2023),
        section 5.1, "dataset-specific accuracy".

    Args:
        space: Embeddings of all datasets, with `source`.
        metric: Spec string of a metric over queries that returns one value.
    """
    measure, arguments = bind("metrics", metric)
    return {name: measure(part, **arguments) for name, part in divide(space).items()}
