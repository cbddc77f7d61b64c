"""CUB-200-2011: birds."""

from __future__ import annotations

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "images.txt, image_class_labels.txt, classes.txt and images/"


def cub200(*, root: str = "data/CUB_200_2011", on_missing: str = "error") -> Table:
    """The Caltech-UCSD Birds-200-2011 dataset (Wah et al., 2011); division of Oh Song et al. (CVPR 2016).

        classes 1-100 train (5,864 pictures), 101-200 test (5,924)

    The official `train_test_split.txt` divides every class in two and is not used: here the test classes are never seen in training.

    Args:
        root: the official folder.
        on_missing: `error` where a listed picture is absent, or `skip` it.
    """
    folder = locate(root, "cub200", LAYOUT)
    names = dict(columns(need(folder, "classes.txt", layout=LAYOUT), int, str))
    labels = dict(columns(need(folder, "image_class_labels.txt", layout=LAYOUT), int, int))
    listed = columns(need(folder, "images.txt", layout=LAYOUT), int, str)
    for picture, path in listed:
        if picture not in labels:
            raise UnimetricError(f"`{folder}/image_class_labels.txt` has no class for picture {picture}, `{path}`", "fetch the file again")
    keys = [labels[picture] for picture, _ in listed]
    paths = [f"{folder}/images/{path}" for _, path in listed]
    return tabulate("cub200", paths, keys, names, [key <= 100 for key in keys], on_missing=on_missing)
