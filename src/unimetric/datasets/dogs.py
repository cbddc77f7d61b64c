"""Stanford Dogs: dog breeds, with images of ImageNet."""

from __future__ import annotations

from typing import Literal

from unimetric.datasets._reading import locate, matlab, need, pictures
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "Images/ with one folder per breed, such as n02085620-Chihuahua/, and best also file_list.mat (or lists/file_list.mat)"


def dogs(*, root: str = "data/dogs", on_missing: Literal["error", "skip"] = "error") -> Table:
    """Stanford Dogs: 120 dog breeds.

        breeds 1-60 train (10,651 images), 61-120 test (9,929)

    The split is that of PUMA (Kim et al., 2023), in the order of `file_list.mat`. Without that
    file, the folders of `Images/` are read in sorted order, which is the same. In the official
    download, 37 images are in two breeds; they are read as they are.

    Reference:
        Novel dataset for fine-grained image categorization: Stanford Dogs (Khosla et al., FGVC
        workshop at CVPR 2011).

    Args:
        root: Official folder.
        on_missing: What to do if a listed image is missing: `error`, or `skip` it.
    """
    folder = locate(root, "dogs", LAYOUT)
    images = need(folder, "Images", layout=LAYOUT)
    lists = [file for file in (folder / "file_list.mat", folder / "lists" / "file_list.mat") if file.exists()]
    if lists:
        files, labels = matlab(lists[0], "file_list", "labels")
        paths, keys = [str(file.item()) for file in files], [int(label) for label in labels]
        if len(paths) != len(keys):
            raise UnimetricError(
                f"`{lists[0]}` must have one label per image, got {len(paths)} images and {len(keys)} labels", "download the file again"
            )
    else:
        paths = [path for path in pictures(images) if path.count("/") == 1]
        found = sorted({path.split("/")[0] for path in paths})
        breeds = {breed: number for number, breed in enumerate(found, 1)}
        if len(breeds) != 120:  # the split counts breeds, so a missing one would shift the rest
            raise UnimetricError(f"`{images}` has {len(breeds)} breeds instead of 120", "complete it, or add the official `file_list.mat`")
        keys = [breeds[path.split("/")[0]] for path in paths]
    names = {key: path.split("/")[0] for key, path in sorted(zip(keys, paths, strict=True))}
    return tabulate("dogs", [f"{images}/{path}" for path in paths], keys, names, [key <= 60 for key in keys], on_missing=on_missing)
