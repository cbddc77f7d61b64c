"""One file per audit: `audit(gallery, *, ...) -> Findings`.

An audit searches a gallery for images that a person should see: duplicates, wrong labels, hard classes.
"""

from __future__ import annotations

from unimetric.spec import catalogue

catalogue(__name__)
