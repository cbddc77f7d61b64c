"""What a run leaves for a report."""

from __future__ import annotations

import json
import math
from pathlib import Path

from unimetric.engine.look import _shift


def test_the_shift_of_a_run_is_what_its_file_of_splits_says(tmp_path: Path) -> None:
    ours = {"history": [{"key": "0", "distance": 1.5}, {"key": "2", "distance": 2.5}], "splits": {"1": {"key": "2", "distance": 2.5}}}
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    (tmp_path / "silent.json").write_text(json.dumps({"1": {"train": []}}))
    assert _shift(f"ood(path='{tmp_path}/ours.json', split=1)") == 2.5
    assert _shift(f"ood(path='{tmp_path}/ours.json', key='0')") == 1.5
    assert math.isnan(_shift(f"published(path='{tmp_path}/silent.json')"))
    assert math.isnan(_shift("standard"))
    (tmp_path / "theirs.json").write_text(json.dumps({"4": {"fid": 8.6}}))
    assert _shift(f"published(path='{tmp_path}/theirs.json', split=4)") == 8.6
