"""Reports: tables and figures of run folders in one HTML file.

Reads folders only, and does not import torch.
"""

from unimetric.report.page import report

__all__ = ["report"]
