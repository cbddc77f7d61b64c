"""NABirds: birds of North America."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "images.txt, image_class_labels.txt, classes.txt and images/"


def nabirds(*, root: str = "data/nabirds", on_missing: Literal["error", "skip"] = "error") -> Table:
    """NABirds: 555 visual categories of North American birds.

        by class id, the first 278 of 555 classes train (22,909 images), the last 277 test (25,653)

    The split is that of PUMA (Kim et al., 2023). `classes.txt` also lists the inner nodes of a
    taxonomy; only the leaves have images. Names may repeat, so a class is named `id.name`.

    Reference:
        Building a bird recognition app and large scale dataset with citizen scientists (Van Horn
        et al., CVPR 2015).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "nabirds", LAYOUT)
    names = dict(columns(need(folder, "classes.txt", layout=LAYOUT), int, str))
    labels = dict(columns(need(folder, "image_class_labels.txt", layout=LAYOUT), str, int))
    listed = columns(need(folder, "images.txt", layout=LAYOUT), str, str)
    leaves = sorted(set(labels.values()))
    if len(leaves) != 555:  # the split counts classes, so a missing one would shift the rest
        raise UnimetricError(
            f"`{folder}/image_class_labels.txt` has {len(leaves)} classes instead of 555", "download the official file again"
        )
    for image, path in listed:
        if image not in labels:
            raise UnimetricError(f"`{folder}/image_class_labels.txt` has no class for image {image}, `{path}`", "download the file again")
    keys = [labels[image] for image, _ in listed]
    class_names = {key: f"{key:04}.{names[key]}" for key in leaves if key in names}
    first = set(leaves[:278])
    paths = [f"{folder}/images/{path}" for _, path in listed]
    return tabulate("nabirds", paths, keys, class_names, [key in first for key in keys], on_missing=on_missing)
