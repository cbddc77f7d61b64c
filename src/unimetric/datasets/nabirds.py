"""NABirds: birds of North America."""

from __future__ import annotations

from unimetric.datasets._reading import columns, locate, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "images.txt, image_class_labels.txt, classes.txt and images/"


def nabirds(*, root: str = "data/nabirds", on_missing: str = "error") -> Table:
    """Building a bird recognition app and large scale dataset with citizen scientists (Van Horn et al., CVPR 2015).

        by class id, the first 278 of 555 classes train (22,909 pictures), the last 277 test (25,653)

    The division is that of PUMA (Kim et al., 2023). `classes.txt` also names the inner nodes of a tree of kinds; only the leaves
    have pictures. Nothing promises that names differ, so a class is called `id.name`.

    Args:
        root: the official folder.
        on_missing: `error` where a listed picture is absent, or `skip` it.
    """
    folder = locate(root, "nabirds", LAYOUT)
    names = dict(columns(need(folder, "classes.txt", layout=LAYOUT), int, str))
    labels = dict(columns(need(folder, "image_class_labels.txt", layout=LAYOUT), str, int))
    listed = columns(need(folder, "images.txt", layout=LAYOUT), str, str)
    leaves = sorted(set(labels.values()))
    if len(leaves) != 555:  # the division counts classes, so one that lacks would move the rest
        raise UnimetricError(f"`{folder}/image_class_labels.txt` has {len(leaves)} classes instead of 555", "fetch the official file again")
    for picture, path in listed:
        if picture not in labels:
            raise UnimetricError(f"`{folder}/image_class_labels.txt` has no class for picture {picture}, `{path}`", "fetch the file again")
    keys = [labels[picture] for picture, _ in listed]
    class_names = {key: f"{key:04}.{names[key]}" for key in leaves if key in names}
    first = set(leaves[:278])
    paths = [f"{folder}/images/{path}" for _, path in listed]
    return tabulate("nabirds", paths, keys, class_names, [key in first for key in keys], on_missing=on_missing)
