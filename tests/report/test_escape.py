"""Names from datasets and settings pass through every format of the report unharmed."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unimetric.report.escape import one_line
from unimetric.report.folders import Record
from unimetric.report.numbers import Method
from unimetric.report.page import page
from unimetric.report.tables import as_csv, as_latex, as_markdown, results

#: Pieces with a meaning in one of the formats.
_PIECES = [
    "<!--",
    "<script>",
    "</script>",
    "-->",
    "]]>",
    "\n",
    "\r",
    "\u2028",
    "%",
    "\\",
    "\\\\",
    "[",
    "*",
    "&",
    "|",
    "`",
    "](",
    "$",
    "{",
    "^^M",
]
_PIECES += ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", ";=1", ",", '"', "'", "\t", "\x00", "\ud800", "{{DATA}}", "é", "字"]
NAMES = st.lists(st.sampled_from(_PIECES) | st.text(st.characters(), max_size=4), min_size=1, max_size=6).map("".join)


def method(name: str, dataset: str) -> Method:
    """A method whose name, dataset, class names and metric come from elsewhere."""
    two = np.arange(2)
    gallery = {"labels": two, "names": np.array([name + "!", dataset + "!"]), "source": np.array([""]), "shift": np.array(np.nan)}
    gallery |= {"embeddings": np.eye(2), "queries": two, "neighbours": two[::-1, None], "spectrum": np.ones(2)}
    gallery |= {"thumbnails": np.zeros(2, np.uint8), "ends": np.array([1, 2])}
    best = {"epoch": 1, "test/recall(k=1)": 0.5, f"test/per_source/{name}": 0.25}
    known = {"dataset": dataset, "loss": name, "seed": 0, "epochs": 1, "metrics": ["recall(k=1)"]}
    return Method(name, [Record(Path("a"), "a", known, [best, best | {"epoch": 2}], best, {"device": name}, {}, gallery)])


class Reader(HTMLParser):
    """Reads the embedded data, the cells of the tables, and the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.path: list[str] = []
        self.elements: list[str] = []
        self.data, self.cells = "", [""]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.path.append("data" if dict(attrs).get("id") == "data" else tag)
        self.cells += [""] * (tag == "td")

    def handle_endtag(self, tag: str) -> None:
        self.path.pop()

    def handle_data(self, data: str) -> None:
        if self.path[-1:] == ["data"]:
            self.data += data
        if self.path[-1:] == ["td"]:
            self.cells[-1] += data


@settings(max_examples=150, deadline=None)
@given(NAMES, NAMES)
@example("x<!--<script>", "x<!--<script>")
@example("a", "cub\n\\input{secret}")
@example("=HYPERLINK(1)", "a;=1")
def test_names_survive_every_format(name: str, dataset: str) -> None:
    found = [method(name, dataset), replace(method(name, dataset), name="other")]
    tables = results(found)
    _check_page(page(found, tables, [(Path("a"), name)], most=2), name, dataset)
    _check_csv(as_csv(tables), name, dataset)
    lines = as_latex(tables).splitlines()
    assert len(lines) == 9 and lines[0].startswith("% ")
    for line in (lines[3], *lines[5:7]):
        assert len(re.findall(r"(?<!\\)&", line)) == 2  # three columns
        # A row starts with no argument of the `\\` before it, and every brace is closed.
        assert not line.startswith(("[", "*")) and not re.search(r"(?<!\\)[%#~^]", line)
        assert len(re.findall(r"(?<!\\)\{", line)) == len(re.findall(r"(?<!\\)\}", line))
    lines = as_markdown(tables).split("\n")
    assert len(lines) == 7 and {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines[2:6]} == {5}
    assert not re.search(r"(?<!\\)(?:\\\\)*[<`]", "".join(lines))


def _check_page(text: str, name: str, dataset: str) -> None:
    text.encode()
    plain = [method("a", "b"), replace(method("a", "b"), name="other")]
    expected = Reader(page(plain, results(plain), [(Path("a"), "a")], most=2))
    read = Reader(text)
    assert read.elements == expected.elements
    data = json.loads(read.data)
    assert data["galleries"][0]["names"] == [name + "!", dataset + "!"]
    assert "<" not in read.data
    # A browser reads a lone carriage return as a line break; neither stays in a name.
    assert " ".join(read.cells[1].split()) == " ".join(
        re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]", " ", name).split()
    )


def _check_csv(text: str, name: str, dataset: str) -> None:
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 4 and None not in rows[0] and None not in rows[0].values()
    for row in rows:
        for cell in (row["dataset"], row["method"], row["metric"]):
            assert not re.search(r"(^|;)\s*[=+\-@\uff1d\uff0b\uff0d\uff20]", cell)
    assert rows[0]["method"].replace("'", "") == one_line(name).replace("'", "")
    assert rows[0]["dataset"].replace("'", "") == one_line(dataset).replace("'", "")
