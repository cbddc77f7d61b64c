"""CUB-200-2011: birds."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "images.txt, image_class_labels.txt, classes.txt and images/"


def cub200(*, root: str = "data/CUB_200_2011", on_missing: Literal["error", "skip"] = "error") -> Table:
    """CUB-200-2011: bird species, with the split of Oh Song et al. (CVPR 2016).

        classes 1-100 train (5,864 images), 101-200 test (5,924)

    The official `train_test_split.txt` divides every class in two and is not used. Here the test
    classes are disjoint from the training classes.

    Reference:
        The Caltech-UCSD Birds-200-2011 dataset (Wah et al., 2011).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "cub200", LAYOUT)
    names = dict(columns(need(folder, "classes.txt", layout=LAYOUT), int, str))
    labels = dict(columns(need(folder, "image_class_labels.txt", layout=LAYOUT), int, int))
    listed = columns(need(folder, "images.txt", layout=LAYOUT), int, str)
    for image, path in listed:
        if image not in labels:
            raise UnimetricError(f"`{folder}/image_class_labels.txt` has no class for image {image}, `{path}`", "download the file again")
    keys = [labels[image] for image, _ in listed]
    paths = [f"{folder}/images/{path}" for _, path in listed]
    return tabulate("cub200", paths, keys, names, [key <= 100 for key in keys], on_missing=on_missing)
