"""One file a transform: `transform(*, ...) -> Recipe`, how pictures become squares in training and in testing.

A recipe is data, not code: the engine carries it out on the device in batches, or one by one in the workers that decode files, and
both crop the same boxes.
"""

from __future__ import annotations

from unimetric.images.recipe import Recipe

__all__ = ["Recipe"]
