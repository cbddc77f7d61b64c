"""One file per dataset: `dataset(root=...) -> Table`.

A reader opens no image. It lists a folder once with `os.scandir` and recognizes images by their names.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(
    __name__,
    SUFFIXES="unimetric.datasets._reading",
    columns="unimetric.datasets._reading",
    locate="unimetric.datasets._reading",
    matlab="unimetric.datasets._reading",
    need="unimetric.datasets._reading",
    pictures="unimetric.datasets._reading",
    place="unimetric.datasets._reading",
    Key="unimetric.datasets._tabulate",
    divide="unimetric.datasets._tabulate",
    tabulate="unimetric.datasets._tabulate",
    without_singles="unimetric.datasets._tabulate",
)
