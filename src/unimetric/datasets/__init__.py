"""One file a dataset: `dataset(root=...) -> Table`. Readers share `_reading.py` and `_tabulate.py`.

No picture is opened by a reader: a folder is listed once with `os.scandir`, and names decide what is a picture.
"""

from __future__ import annotations

from unimetric.datasets._reading import SUFFIXES, columns, locate, matlab, need, pictures, place
from unimetric.datasets._tabulate import Key, choice, divide, tabulate, without_singles

__all__ = ["SUFFIXES", "Key", "choice", "columns", "divide", "locate", "matlab", "need", "pictures", "place", "tabulate", "without_singles"]
