"""FGVC-Aircraft: aircraft variants."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "data/images/ and data/images_variant_train.txt, ..._val.txt and ..._test.txt"


def aircraft(*, root: str = "data/fgvc-aircraft-2013b", on_missing: Literal["error", "skip"] = "error") -> Table:
    """FGVC-Aircraft: 100 aircraft variants.

        by name, the first 50 of 100 variants train (5,000 images), the last 50 test (5,000)

    The split is that of PUMA (Kim et al., 2023). The official lists divide every variant into three
    parts, and all three are read.

    Reference:
        Fine-grained visual classification of aircraft (Maji et al., arXiv 1306.5151, 2013).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "aircraft", LAYOUT)
    images = need(folder, "data/images", layout=LAYOUT)
    rows: list[tuple[str, str]] = []
    for part in ("train", "val", "test"):
        rows += [(number, variant) for number, variant in columns(need(folder, f"data/images_variant_{part}.txt", layout=LAYOUT), str, str)]
    variants = sorted({variant for _, variant in rows})
    if len(variants) != 100:  # the split counts variants, so a missing one would shift the rest
        raise UnimetricError(
            f"the lists in `{folder}/data` have {len(variants)} variants instead of 100", "download the official files again"
        )
    first = set(variants[:50])
    return tabulate(
        "aircraft",
        [f"{images}/{number}.jpg" for number, _ in rows],
        [variant for _, variant in rows],
        {variant: variant for variant in variants},
        [variant in first for _, variant in rows],
        on_missing=on_missing,
    )
