"""Run folders become tables, figures and one page that needs no network. Reads folders only; no torch here."""

from unimetric.report.page import report

__all__ = ["report"]
