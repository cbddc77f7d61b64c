"""Cars196: makes and models of cars."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from unimetric.datasets._reading import locate, matlab, need
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = (
    "cars_train/, cars_test/, devkit/cars_meta.mat, devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat"
    "; or, of the older download, car_ims/ and cars_annos.mat"
)


def cars196(*, root: str = "data/cars196", on_missing: Literal["error", "skip"] = "error") -> Table:
    """Cars196: makes and models of cars, with the split of Oh Song et al. (CVPR 2016).

        classes 1-98 train (8,054 images), 99-196 test (8,131)

    Both official downloads are read: images in `cars_train/` and `cars_test/` with the devkit, or
    all in `car_ims/`. The test labels were published later, as `cars_test_annos_withlabels.mat`,
    next to the devkit or in it. The two downloads name their images differently.

    Reference:
        3D object representations for fine-grained categorization (Krause et al., 3DRR 2013).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "cars196", LAYOUT)
    if (folder / "car_ims").is_dir():
        file = need(folder, "cars_annos.mat", "devkit/cars_annos.mat", layout=LAYOUT)
        (names,) = matlab(file, "class_names")
        paths, keys = _annotations(file, "relative_im_path", folder)
    else:
        need(folder, "cars_train", layout=LAYOUT)
        (names,) = matlab(need(folder, "devkit/cars_meta.mat", "cars_meta.mat", layout=LAYOUT), "class_names")
        paths, keys = [], []
        for part, *places in (
            ("cars_train", "devkit/cars_train_annos.mat", "cars_train_annos.mat"),
            ("cars_test", "cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"),
        ):
            found = _annotations(need(folder, *places, layout=LAYOUT), "fname", folder / part)
            paths += found[0]
            keys += found[1]
    class_names = {number: str(name.item()) for number, name in enumerate(names, 1)}
    return tabulate("cars196", paths, keys, class_names, [key <= 98 for key in keys], on_missing=on_missing)


def _annotations(file: Path, name: str, folder: Path) -> tuple[list[str], list[int]]:
    (rows,) = matlab(file, "annotations")
    for field in (name, "class"):
        if field not in (rows.dtype.names or ()):
            # The usual cause is cars_test_annos.mat of the devkit, which has boxes but no classes.
            raise UnimetricError(
                f"`{file}` has no `{field}`", "use the official file with labels; for the test part it ends in `_withlabels.mat`"
            )
    return [f"{folder}/{value.item()}" for value in rows[name]], [int(value.item()) for value in rows["class"]]
