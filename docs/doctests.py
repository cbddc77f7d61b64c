"""Griffe extension: render the doctests of a docstring as code. `zensical.toml` names this file."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Put a fence around each paragraph that starts with `>>>`, unless its section does that."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)


def fence(text: str) -> str:
    """Return the text with fenced doctests.

    >>> print(fence("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return re.sub(r"(?m)^>>> .*(?:\n(?! *$).*)*", lambda found: f"```pycon\n{found[0]}\n```", text)
