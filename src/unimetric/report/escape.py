"""Text in the formats of the report.

Names come from datasets and settings, and may contain anything.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: Characters that end a line or have no glyph, except for the line feed.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")

_LATEX = str.maketrans(
    {each: f"\\{each}" for each in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    # After the end of a row, these would be an argument of `\\`.
    | {"[": "{[}", "*": "{*}"}
)

#: The start of a formula in a spreadsheet, at the start of a cell. Some spreadsheets also end cells at semicolons.
_FORMULA = re.compile(r"(^|;)(\s*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")


def one_line(text: str) -> str:
    """Return a text without line breaks and control characters, which become spaces.

    >>> one_line("a\\nb")
    'a b'
    """
    return _CONTROL.sub(" ", text).replace("\n", " ")


def for_html(text: str) -> str:
    """Return a text for an HTML element or attribute. Line feeds stay, for `<pre>`."""
    return html.escape(_CONTROL.sub(" ", text))


def for_script(data: Any) -> str:
    """Return data as JSON for a `<script>` element.

    The element ends at `</script`, and `<!--<script` would hide that end. So the JSON has no `<`.
    """
    return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """Replace values that are not finite by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


def for_latex(text: str) -> str:
    """Return a text for the body of a LaTeX table.

    >>> for_latex("a_b[1]")
    'a\\\\_b{[}1]'
    """
    return one_line(text).translate(_LATEX)


def for_markdown(text: str) -> str:
    """Return a text for a cell or heading of Markdown.

    Tags, code spans, links and column separators are escaped.

    >>> for_markdown("a|b <i>")
    'a\\\\|b \\\\<i>'
    """
    return re.sub(r"[\\|<`]|(?<=\])\(", r"\\\g<0>", one_line(text))


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of a csv file. Cells with text of others need `for_csv`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def for_csv(text: str) -> str:
    """Return a text for a cell of a spreadsheet, where a leading `=` would be a formula.

    >>> for_csv("=1+1"), for_csv("margin")
    ("'=1+1", 'margin')
    """
    return _FORMULA.sub(r"\1\2'", one_line(text))
