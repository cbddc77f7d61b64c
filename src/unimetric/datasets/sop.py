"""Stanford Online Products."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.images.table import Table

LAYOUT = "Ebay_train.txt, Ebay_test.txt and twelve folders from bicycle_final/ to toaster_final/"


def sop(*, root: str = "data/Stanford_Online_Products", on_missing: Literal["error", "skip"] = "error") -> Table:
    """Stanford Online Products with its official split.

        11,318 products train (59,551 images), 11,316 test (60,502)

    A class is one product of a shop, named `category/number`.

    Reference:
        Deep metric learning via lifted structured feature embedding (Oh Song et al., CVPR 2016).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "sop", LAYOUT)
    paths: list[str] = []
    keys: list[int] = []
    train: list[bool] = []
    names: dict[int, str] = {}
    for part in ("train", "test"):
        for _, key, _, path in columns(need(folder, f"Ebay_{part}.txt", layout=LAYOUT), int, int, int, str, header=1):
            paths.append(f"{folder}/{path}")
            keys.append(key)
            train.append(part == "train")
            names.setdefault(key, f"{path.split('/')[0].removesuffix('_final')}/{key}")
    return tabulate("sop", paths, keys, names, train, on_missing=on_missing)
