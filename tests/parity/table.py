"""Prints `docs/parity.md`, one row per registered test: `python -m tests.parity.table > docs/parity.md`."""

from __future__ import annotations

import importlib

from .compared import Comparison

SECTIONS = {
    "test_revisiting": "Revisiting (Roth et al., ICML 2020) and Proxy-Anchor (Kim et al., CVPR 2020)",
    "test_puma": "PUMA (Kim et al., WACV 2025)",
    "test_oodml": "ooDML (Milbich et al., NeurIPS 2021), DiVA (Milbich et al., ECCV 2020) and S2SD (Roth et al., ICML 2021)",
    "test_crt": "CRT (Kan et al., NeurIPS 2022)",
}

OPENING = """\
# Comparison with the authors' code

Generated from `tests/parity` by `make docs`. Do not edit this page.

Each row is a test. It compares a component with a plain float64 transcription of what the authors' public code computes, bugs included.
Inputs, weights and drawn tuples are the same on both sides. Losses, objectives and adapters agree in value and gradient. "Option" lists the
arguments with which the component computes what the authors' code computes. "Within" is the largest difference, relative to
the largest entry.

- *equal*: the defaults compute the same.
- *equal with the option*: the arguments listed compute the same.
- *deviates by choice*: the component follows the paper instead, and the test measures the difference. If an option gives what the code
  computes, another row lists it.

| code | repository |
|---|---|
| Revisiting | [Revisiting_Deep_Metric_Learning_PyTorch](https://github.com/Confusezius/Revisiting_Deep_Metric_Learning_PyTorch) |
| Proxy-Anchor | [tjddus9597/Proxy-Anchor-CVPR2020](https://github.com/tjddus9597/Proxy-Anchor-CVPR2020) |
| PUMA | [tjddus9597/PUMA-WACV25](https://github.com/tjddus9597/PUMA-WACV25) |
| ooDML | [CompVis/Characterizing_Generalization_in_DML](https://github.com/CompVis/Characterizing_Generalization_in_DML) |
| DiVA | [Confusezius/ECCV2020_DiVA_MultiFeature_DML](https://github.com/Confusezius/ECCV2020_DiVA_MultiFeature_DML) |
| S2SD | [MLforHealth/S2SD](https://github.com/MLforHealth/S2SD), also part of ooDML |
| CBML | [kanshichao/CBML](https://github.com/kanshichao/CBML); CRT has no public code, so its printed equations are compared |
"""

COLUMNS = ("component", "authors' code", "verdict", "option", "within", "difference")


def comparisons() -> dict[str, list[Comparison]]:
    """Return the registered comparisons of every test module, in the order of its source."""
    found = {}
    for module in SECTIONS:
        members = vars(importlib.import_module(f".{module}", __package__))
        found[module] = [
            member.comparison for name, member in members.items() if name.startswith("test_") and hasattr(member, "comparison")
        ]
    return found


def line(comparison: Comparison) -> str:
    """Return one row of the table."""
    methods = " ".join(f"`{method}`" for method in comparison.method.split(", "))
    code, place, *rest = comparison.theirs.split(" ")
    theirs = comparison.theirs if code in ("CRT", "CBML") else " ".join([code, f"`{place}`", *rest])
    flag = f"`{comparison.flag}`" if comparison.flag else ""
    within = "" if comparison.within is None else f"{comparison.within:.0e}"
    return " | ".join(["", methods, theirs, comparison.verdict, flag, within, comparison.note, ""]).strip()


def page() -> str:
    """Return the page."""
    lines = [OPENING, "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for module, found in comparisons().items():
        lines.append(f"| **{SECTIONS[module]}** |" + " |" * (len(COLUMNS) - 1))
        lines.extend(line(comparison) for comparison in found)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
