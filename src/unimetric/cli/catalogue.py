"""Catalogue of the components, read from docstrings and signatures.

`unimetric list` and `docs/papers.md` show it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from unimetric.spec import find, kinds, names, signature

_MORE = {"losses": ("family", "miner", "classes"), "miners": ("gives",)}


def columns(kind: str) -> tuple[str, ...]:
    """Return the columns of the table of a component type."""
    return ("name", *_MORE.get(kind, ()), "source")


def catalogue(kind: str) -> list[dict[str, str]]:
    """Return one row per component, with the columns of its type.

    >>> next(row["classes"] for row in catalogue("losses") if row["name"] == "arcface")
    'needs them'
    """
    return [_row(kind, name, find(kind, name)) for name in names(kind)]


def _row(kind: str, name: str, part: Any) -> dict[str, str]:
    parameters = signature(part).parameters
    needs = "num_classes" in parameters and parameters["num_classes"].default is inspect.Parameter.empty
    return {
        "name": name,
        "family": part.family if kind == "losses" else "",
        "miner": part.default_miner or "-" if kind == "losses" else "-",
        "classes": "needs them" if needs else "-",
        "gives": part.gives.__name__ if kind == "miners" else "",
        "source": source(part),
    }


def source(part: Any) -> str:
    """Return the first citation in the `Reference:` section of a component's docstring.

    Without that section, the citation is read from the first paragraph. Without a citation, the first sentence is returned.

    >>> source(find("losses", "margin"))
    'Sampling matters in deep embedding learning (Wu et al., ICCV 2017)'
    """
    written = inspect.getdoc(part) or ""
    section = re.search(r"^Reference:\n((?:    .*\n?)+)", written, re.MULTILINE)
    text = " ".join((section[1] if section else written.split("\n\n")[0]).split())
    cited = re.match(r".*?\(.*?\d{4}\)|.*?et al\. \d{4}", text)
    return cited[0] if cited else re.split(r"[.:] ", text)[0].removesuffix(".")


_PAGES = ("losses", "miners", "objectives", "samplers", "metrics", "heads", "backbones", "transforms", "datasets", "splits")


def papers() -> str:
    """Return the text of `docs/papers.md`: the signature and docstring of every component."""
    lines = ["# Components and their papers", "", "Generated from the docstrings by `make docs`.", ""]
    for kind in (*_PAGES, *sorted(set(kinds()) - set(_PAGES))):
        lines += [f"## {kind}", ""]
        for name in names(kind):
            part = find(kind, name)
            taken = [text for key, parameter in signature(part).parameters.items() if (text := _argument(key, parameter))]
            lines += [f"### `{name}`", "", "```text", f"{name}({', '.join(taken)})", "", inspect.getdoc(part) or "", "```", ""]
    return "\n".join(lines)


def _argument(key: str, parameter: inspect.Parameter) -> str:
    if parameter.kind is not parameter.KEYWORD_ONLY:
        return ""
    return key if parameter.default is parameter.empty else f"{key}={parameter.default!r}"


if __name__ == "__main__":
    print(papers(), end="")
