"""What there is: every part of a kind, read from its docstring and signature. `unimetric list` and `docs/papers.md` are made of it."""

from __future__ import annotations

import inspect
import re
from typing import Any

from unimetric.spec import find, kinds, names, signature

_MORE = {"losses": ("family", "miner", "classes"), "miners": ("gives",)}


def columns(kind: str) -> tuple[str, ...]:
    """What is told of each part of a kind."""
    return ("name", *_MORE.get(kind, ()), "source")


def catalogue(kind: str) -> list[dict[str, str]]:
    """One row a part: its name, where it comes from, and for losses and miners what they need and give.

    >>> next(row["classes"] for row in catalogue("losses") if row["name"] == "arcface")
    'needs them'
    """
    return [_row(name, find(kind, name)) for name in names(kind)]


def _row(name: str, part: Any) -> dict[str, str]:
    parameters = signature(part).parameters
    needs = "num_classes" in parameters and parameters["num_classes"].default is inspect.Parameter.empty
    gives = getattr(part, "gives", None)
    return {
        "name": name,
        "family": getattr(part, "family", ""),
        "miner": getattr(part, "default_miner", "-"),
        "classes": "needs them" if needs else "-",
        "gives": gives.__name__ if gives else "",
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
    """The page `docs/papers.md`: every part with its citation, equation, defaults, and where it differs from the paper."""
    lines = ["# The parts and their papers", "", "Made from the docstrings by `make docs`.", ""]
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
