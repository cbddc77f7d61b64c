"""In-Shop Clothes Retrieval, a part of DeepFashion."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Table

LAYOUT = "list_eval_partition.txt (or Eval/list_eval_partition.txt) and img/ (or Img/img/)"


def inshop(*, root: str = "data/In-shop", on_missing: Literal["error", "skip"] = "error") -> Table:
    """In-Shop Clothes Retrieval with its official split.

        3,997 items train (25,882 images); 3,985 others have 14,218 query and 12,612 gallery images

    A class is one item, named by its id. Training images have no such roles: they are both queries
    and gallery items, so that some of them can be used for validation.

    Reference:
        DeepFashion: powering robust clothes recognition and retrieval (Liu et al., CVPR 2016).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "inshop", LAYOUT)
    file = need(folder, "list_eval_partition.txt", "Eval/list_eval_partition.txt", layout=LAYOUT)
    base = need(folder, "img", "Img/img", layout=LAYOUT).parent
    rows = columns(file, str, str, str, header=2)  # the first lines are a count and the column names
    for path, _, part in rows:
        if part not in ("train", "query", "gallery"):
            raise UnimetricError(f"`{file}`: unknown part `{part}` of `{path}`", closest(part, ("train", "query", "gallery")))
    return tabulate(
        "inshop",
        [f"{base}/{path}" for path, _, _ in rows],
        [item for _, item, _ in rows],
        {item: item for item in sorted({item for _, item, _ in rows})},
        [part == "train" for *_, part in rows],
        on_missing=on_missing,
        query=[part != "gallery" for *_, part in rows],
        gallery=[part != "query" for *_, part in rows],
    )
