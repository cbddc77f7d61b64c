"""Stanford Dogs: breeds, pictures of ImageNet."""

from __future__ import annotations

from unimetric.datasets._reading import locate, matlab, need, pictures
from unimetric.datasets._tabulate import tabulate
from unimetric.errors import UnimetricError
from unimetric.images.table import Table

LAYOUT = "Images/ with one folder a breed, such as n02085620-Chihuahua/, and best also file_list.mat (or lists/file_list.mat)"


def dogs(*, root: str = "data/dogs", on_missing: str = "error") -> Table:
    """Novel dataset for fine-grained image categorization: Stanford Dogs (Khosla et al., FGVC workshop at CVPR 2011).

        breeds 1-60 train (10,651 pictures), 61-120 test (9,929)

    in the order of `file_list.mat`, the division of PUMA (Kim et al., 2023). Without that file the folders of `Images/` are read in
    sorted order, which is the same. In the official download 37 pictures stand in two breeds; it is read as it is.

    Args:
        root: the official folder.
        on_missing: `error` where a listed picture is absent, or `skip` it.
    """
    folder = locate(root, "dogs", LAYOUT)
    images = need(folder, "Images", layout=LAYOUT)
    lists = [file for file in (folder / "file_list.mat", folder / "lists" / "file_list.mat") if file.exists()]
    if lists:
        files, labels = matlab(lists[0], "file_list", "labels")
        paths, keys = [str(file.item()) for file in files], [int(label) for label in labels]
        if len(paths) != len(keys):
            raise UnimetricError(f"`{lists[0]}` has {len(paths)} pictures and {len(keys)} labels", "fetch the file again")
    else:
        paths = [path for path in pictures(images) if path.count("/") == 1]
        breeds = {breed: number for number, breed in enumerate(sorted({path.split("/")[0] for path in paths}), 1)}
        if len(breeds) != 120:  # the division counts breeds, so one that lacks would move the rest
            raise UnimetricError(f"`{images}` has {len(breeds)} breeds instead of 120", "complete it, or add the official `file_list.mat`")
        keys = [breeds[path.split("/")[0]] for path in paths]
    names = {key: path.split("/")[0] for key, path in sorted(zip(keys, paths, strict=True))}
    return tabulate("dogs", [f"{images}/{path}" for path in paths], keys, names, [key <= 60 for key in keys], on_missing=on_missing)
