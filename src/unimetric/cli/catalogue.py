"""Catalogue of the components and settings.

It is read from docstrings and signatures without importing torch. `unimetric list` shows it. `docs/papers.md`
and `docs/settings.md` are made of it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from unimetric.arguments import describe_values
from unimetric.config import NO_RESULT, PARTS, RunConfig, setting_types
from unimetric.declarations import Declaration
from unimetric.spec import KINDS, declaration, names, offered_to

_MORE = {"losses": ("family", "miner", "classes"), "miners": ("gives",)}


def columns(kind: str) -> tuple[str, ...]:
    """Return the columns of the table of a component type."""
    return ("name", *_MORE.get(kind, ()), "source")


def catalogue(kind: str) -> list[dict[str, str]]:
    """Return one row per component, with the columns of its type.

    >>> next(row["classes"] for row in catalogue("losses") if row["name"] == "arcface")
    'needs them'
    """
    return [_row(name, declaration(kind, name)) for name in names(kind)]


def _row(name: str, declared: Declaration) -> dict[str, str]:
    classes = declared.parameters.get("num_classes")
    return {
        "name": name,
        "family": declared.members.get("family", ""),
        "miner": declared.members.get("default_miner") or "-",
        "classes": "needs them" if classes is not None and classes.default is classes.empty else "-",
        "gives": declared.members.get("gives", ""),
        "source": source(declared.doc),
    }


def source(doc: str) -> str:
    """Return the first citation in the `Reference:` section of a docstring.

    Without that section, the citation is read from the first paragraph. Without a citation, the first sentence is returned.

    >>> source(declaration("losses", "margin").doc)
    'Sampling matters in deep embedding learning (Wu et al., ICCV 2017)'
    """
    section = _section(doc, "Reference")
    text = " ".join((section or doc.split("\n\n")[0]).split())
    cited = re.match(r".*?\(.*?\d{4}\)|.*?et al\. \d{4}", text)
    return cited[0] if cited else re.split(r"[.:] ", text)[0].removesuffix(".")


# --- One component ----------------------------------------------------------------------------------


def _section(doc: str, title: str) -> str:
    """Return the text of a section of a docstring, without its title."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n(?=    ))+)", doc, re.MULTILINE)
    return inspect.cleandoc("\n" + found[1]) if found else ""


def _meanings(doc: str) -> dict[str, str]:
    """Return the description of each argument in a docstring, on one line."""
    found = re.findall(r"^(\w+(?:, \w+)*): ((?:.*\n?)(?:    .*\n?)*)", _section(doc, "Args"), re.MULTILINE)
    return {key: " ".join(text.split()) for keys, text in found for key in keys.split(", ")}


def call(name: str, declared: Declaration) -> str:
    """Return a component with all its arguments, as it is called in Python.

    >>> call("recall", declaration("metrics", "recall"))
    'recall(k=1)'
    """
    given = {key: each.default for key, each in declared.configured.items()}
    words = [key if default is inspect.Parameter.empty else f"{key}={default!r}" for key, default in given.items()]
    return f"{name}({', '.join(words)})"


def arguments(declared: Declaration) -> list[tuple[str, str, str, str]]:
    """Return the name, allowed values, default and meaning of each argument of a component.

    >>> arguments(declaration("metrics", "recall"))[0][:3]
    ('k', 'integer, at least 1', '1')
    """
    meanings = _meanings(declared.doc)
    rows = []
    for key, parameter in declared.configured.items():
        default = repr(parameter.default)
        if parameter.default is parameter.empty:
            kind = declared.module.rpartition(".")[0].rpartition(".")[2]
            default = "required"
            if key in offered_to(kind):
                default = "from the index" if kind == "stores" else "from the run"
        rows.append((key, describe_values(parameter.annotation), default, meanings.get(key, "")))
    return rows


def description(declared: Declaration) -> str:
    """Return the docstring of a component without the section of its arguments."""
    return re.sub(r"^Args:\n(?:    .*\n?|\n(?=    ))+\n?", "", declared.doc, flags=re.MULTILINE).strip()


# --- Settings ---------------------------------------------------------------------------------------


def settings() -> list[tuple[str, str, str, str]]:
    """Return the name, allowed values, default and meaning of each setting of a run.

    >>> next(row[1:3] for row in settings() if row[0] == "epochs")
    ('integer, at least 1', '10')
    """
    meanings = _meanings(inspect.getdoc(RunConfig) or "")
    rows = []
    for field in fields(RunConfig):
        default = "; ".join(field.default) if isinstance(field.default, tuple) else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        allowed = describe_values(setting_types()[field.name])
        if field.name in PARTS:
            allowed = f"see `unimetric list {PARTS[field.name]}`"
        rows.append((field.name, allowed, default, meanings[field.name]))
    return rows


def settings_page() -> str:
    """Return the text of `docs/settings.md`: all settings of a run."""
    lines = [
        "# Settings of a run",
        "",
        "Generated from `unimetric.config.RunConfig` by `make docs`. The same keys are used in TOML files, on the command line"
        " (`unimetric train glyphs_margin seed=3`) and in Python (`unimetric.load(seed=3)`). `unimetric list settings` prints this table.",
        "",
        "| setting | allowed values | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, allowed, default, meaning in settings():
        shown = f"`{default}`" if default else "empty"
        lines.append(f"| `{name}` | {allowed} | {shown} | {meaning} |")
    apart = ", ".join(f"`{name}`" for name, *_ in settings() if name in NO_RESULT)
    return "\n".join([*lines, "", f"These settings are not part of the run id: {apart}.", ""])


# --- Pages ------------------------------------------------------------------------------------------

_PAGES = ("losses", "miners", "objectives", "samplers", "metrics", "heads", "backbones", "transforms", "datasets", "splits")


def papers() -> str:
    """Return the text of `docs/papers.md`: the signature and docstring of every component."""
    lines = ["# Components and their papers", "", "Generated from the docstrings by `make docs`.", ""]
    for kind in (*_PAGES, *sorted(set(KINDS) - set(_PAGES))):
        lines += [f"## {kind}", ""]
        for name in names(kind):
            declared = declaration(kind, name)
            lines += [f"### `{name}`", "", "```text", call(name, declared), "", declared.doc, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(papers(), end="")
