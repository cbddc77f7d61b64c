"""The audit of an index: one page without requests, and csv files."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unimetric import Index
from unimetric.cli import app
from unimetric.deploy.audit import audit
from unimetric.errors import UnimetricError


def test_audit_writes_a_page_and_csv_files(index: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(index), "--out", str(tmp_path / "audit.html")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "audit.html").read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == ["Near-duplicates", "Suspicious labels", "Worst classes", "Clusters", "Outliers"]
    assert "data:image/jpeg;base64," in page and not re.search(r"(src|href)=.(?!data:|#)", page)
    with open(tmp_path / "audit.clusters.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 32 and {"id", "cluster", "distance"} == set(rows[0])
    assert "Clusters" in result.output


def test_audit_of_one_kind_with_settings(index: Path, tmp_path: Path) -> None:
    found = audit(index, tmp_path / "a.html", audits=["outliers(spread=0.1)"], most=1)
    assert len(found["outliers(spread=0.1)"].groups) > 1
    page = (tmp_path / "a.html").read_text()
    assert page.count('class="group"') == 1 and "a.outliers.csv" in page
    assert not (tmp_path / "a.clusters.csv").exists()
    found = audit(index, tmp_path / "a.html", audits=["outliers(spread=1e6)"])
    assert not found["outliers(spread=1e6)"].rows and not (tmp_path / "a.outliers.csv").exists()  # of the audit before


def test_audit_without_labels_leaves_out_those_that_need_them(colored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Zero suspicious labels would be a wrong answer."""
    with Index.create(colored / "run", colored / "images", tmp_path / "plain", workers=0, device="cpu") as index:
        place = index.path
    found = audit(place, tmp_path / "a.html")
    assert set(found) == {"near_duplicates", "clusters", "outliers"}
    assert "has no column `label`" in caplog.text and "suspicious_labels" in caplog.text
    with pytest.raises(UnimetricError, match="no column `label`, without which worst_classes") as caught:
        audit(place, tmp_path / "b.html", audits=["worst_classes"])
    assert "--labels" in caught.value.hint and not (tmp_path / "b.html").exists()


def test_audit_rejects_wrong_arguments(index: Path, tmp_path: Path) -> None:
    cases = {
        ".html": {"out": "a.csv"},
        "outlier": {"audits": ["outlierz"]},
        "spread": {"audits": ["outliers(spread=0)"]},
        "no column `kind`": {"label": "kind"},
        "at least one": {"audits": []},
        "is a folder": {"out": "a.folder.html"},
    }
    (tmp_path / "a.folder.html").mkdir()
    for text, options in cases.items():
        with pytest.raises(UnimetricError, match=text):
            audit(index, tmp_path / options.pop("out", "a.html"), **options)
    assert list(tmp_path.glob("a.*")) == [tmp_path / "a.folder.html"]
