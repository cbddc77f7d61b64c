"""A folder of your own: one sub-folder a class."""

from __future__ import annotations

import logging

from unimetric.datasets._reading import SUFFIXES, locate, pictures
from unimetric.datasets._tabulate import divide, tabulate, without_singles
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "one sub-folder a class: CLASS/PICTURE.jpg; or train/CLASS/PICTURE.jpg and test/CLASS/PICTURE.jpg"
HELD_OUT = ("test", "val", "valid", "validation")


def folder(*, root: str, train: float | str | None = None, on_single: str = "error", name: str | None = None) -> Table:
    """Pictures in one sub-folder a class, as torchvision's `ImageFolder` has them; division as in Oh Song et al. (CVPR 2016).

        root/CLASS/PICTURE.jpg                                 the first half of the sorted classes trains, the rest tests
        root/train/CLASS/PICTURE.jpg, root/test/CLASS/...      the parts are what they are called

    Without a `test` part, `val`, `valid` or `validation` is taken for it; beside one it is left out. Files with other endings than
    those of pictures, hidden files, and pictures that lie in no class are passed over.

    Args:
        root: the folder.
        train: which classes train, of all parts together: a share of the sorted classes (0.5 is the first half, rounded up), or a text
            file in the folder with one class a line. By default the two rules above.
        on_single: `error` where a class has one picture only, or `skip` the class.
        name: what to call the dataset; by default as the folder is called.
    """
    base = locate(root, "folder", LAYOUT)
    name = name or base.resolve().name
    files = [path.split("/") for path in pictures(base)]
    files = [path for path in files if len(path) > 1]
    parts = sorted({path[0] for path in files})
    parted = "train" in parts and all(part in ("train", *HELD_OUT) for part in parts) and all(len(path) > 2 for path in files)
    depth = 3 if parted else 2
    for path in files:
        if len(path) != depth:
            raise UnimetricError(f"`{base}/{'/'.join(path)}` lies too deep", f"the folder `{base}` should hold {LAYOUT}")
    if parted and train is None:
        held_out = [part for part in HELD_OUT if part in parts]
        if not held_out:
            raise UnimetricError(
                f"`{base}` has a part `train` and no part `test`", f"add `{base}/test`, or write `train=0.5` to divide by class"
            )
        for part in held_out[1:]:
            logging.getLogger("unimetric").warning("folder: `%s/%s` is left out, since `%s` tests", base, part, held_out[0])
        files = [path for path in files if path[0] in ("train", held_out[0])]
    if not files:
        raise UnimetricError(
            f"`{base}` has no pictures in sub-folders", f"it should hold {LAYOUT}, with files that end in {' '.join(SUFFIXES)}"
        )
    classes = [path[-2] for path in files]
    class_names = sorted(set(classes))
    if parted and train is None:
        trains = [path[0] == "train" for path in files]
    else:
        chosen = divide(name, class_names, 0.5 if train is None else train, base)
        trains = [key in chosen for key in classes]
    paths = [f"{base}/{'/'.join(path)}" for path in files]
    return without_singles(tabulate(name, paths, classes, {key: key for key in class_names}, trains), on_single)
