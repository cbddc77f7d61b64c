"""The tour's commands, in their order, in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from unimetric.cli import main

TOUR = Path(__file__).parents[1] / "docs" / "tour.md"


def test_commands_of_the_tour_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    commands = [line for block in re.findall(r"^```console\n(.*?)^```", TOUR.read_text(), re.S | re.M) for line in block.splitlines()]
    assert len(commands) >= 9
    monkeypatch.chdir(tmp_path)
    for line in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        assert sys.argv[0] == "unimetric"
        with pytest.raises(SystemExit) as leaving:
            main()
        assert not leaving.value.code, f"{line}\n{capsys.readouterr()}"
    assert (tmp_path / "runs" / "second" / "done").exists()
