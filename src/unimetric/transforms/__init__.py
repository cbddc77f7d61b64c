"""One file per transform: `transform(*, ...) -> Recipe`.

A recipe defines how images are cropped in training and in testing. A recipe is data, not code. It is executed
in batches on the device, or per image in the workers that decode files, with the same crop boxes.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__, Recipe="unimetric.images.recipe")
