"""One file per schedule: `schedule(progress, epochs, *, ...) -> factor`.

The factor multiplies every learning rate. `progress` is the number of epochs done, fractions included.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
