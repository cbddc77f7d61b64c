"""In-Shop Clothes Retrieval, a part of DeepFashion."""

from __future__ import annotations

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError, closest
from unimetric.images.table import Table

LAYOUT = "list_eval_partition.txt (or Eval/list_eval_partition.txt) and img/ (or Img/img/)"


def inshop(*, root: str = "data/In-shop", on_missing: str = "error") -> Table:
    """DeepFashion: powering robust clothes recognition and retrieval (Liu et al., CVPR 2016): the dataset and its division.

        3,997 items train (25,882 pictures); of 3,985 others 14,218 pictures ask and 12,612 answer

    A class is one item, named by its id. Training pictures have no such roles: they may ask and answer, so that some of them can validate.

    Args:
        root: the official folder.
        on_missing: `error` where a listed picture is absent, or `skip` it.
    """
    folder = locate(root, "inshop", LAYOUT)
    file = need(folder, "list_eval_partition.txt", "Eval/list_eval_partition.txt", layout=LAYOUT)
    base = need(folder, "img", "Img/img", layout=LAYOUT).parent
    rows = columns(file, str, str, str, header=2)  # a count and the names of the columns come first
    for path, _, part in rows:
        if part not in ("train", "query", "gallery"):
            raise UnimetricError(f"`{file}`: `{path}` is of the part `{part}`", closest(part, ("train", "query", "gallery")))
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
