"""A file from somebody else runs no code: dotted names need the caller's trust."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import exit_code as run

from unimetric.cli import _take_trust
from unimetric.config import PARTS, load
from unimetric.errors import UnimetricError
from unimetric.spec import create, find, trusting
from unimetric.training.loop import train

EXPLOIT = "os.system(command='touch PWNED')"


@pytest.fixture(scope="session")
def finished_run(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    settings = {"transform": "glyphs", "head": "linear(dim=8)", "sampler": "samples_per_class(n=2)", "batch_size": 12, "logger": "none"}
    train(load(dataset=f"pack(path='{letters}')", epochs=1, evaluate_every=0, **settings), folder, quiet=True)
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that records its import, and holds what it defines and what it imports."""
    (tmp_path / "outsider.py").write_text(
        textwrap.dedent(
            """
            import os
            from os import system
            from pathlib import Path

            from torch import nn

            Path("IMPORTED").touch()

            class Loss(nn.Module):
                def forward(self, embeddings, labels, memory=None):
                    return embeddings.sum()

            class Plain:
                pass

            def dataset():
                return None
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNIMETRIC_TRUST", raising=False)
    yield "outsider"
    sys.modules.pop("outsider", None)


@pytest.mark.parametrize("key", PARTS)
def test_check_runs_no_code_of_a_config(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(f'{key} = "{EXPLOIT}"\n')
    assert run(monkeypatch, "check", "e.toml") == 2
    assert "--trust os" in capsys.readouterr().err
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("key", PARTS)
@pytest.mark.parametrize("command", ["evaluate", "train", "export", "report"])
def test_run_folder_from_somebody_else_runs_no_code(
    command: str, key: str, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "given"
    shutil.copytree(finished_run, folder)
    lines = [line for line in (folder / "config.toml").read_text().splitlines() if not line.startswith(f"{key} = ")]
    value = f'["{EXPLOIT}"]' if key == "metrics" else f'"{EXPLOIT}"'
    (folder / "config.toml").write_text("\n".join([*lines, f"{key} = {value}"]))
    monkeypatch.chdir(tmp_path)
    words = {
        "evaluate": ["evaluate", "given"],
        "train": ["train", "given/config.toml", "--out", "given"],
        "export": ["export", "given", "--out", "exported"],
        "report": ["report", "given", "--look", "--out", "report.html"],
    }[command]
    code = run(monkeypatch, *words)
    assert not Path("PWNED").exists()
    if command != "report":  # a report skips the run
        assert code == 2
        assert "--trust os" in capsys.readouterr().err


def test_nothing_is_imported_without_trust(package: str) -> None:
    with pytest.raises(UnimetricError, match="--trust outsider"):
        create("losses", f"{package}.Loss")
    assert not Path("IMPORTED").exists()


def test_trust_is_given_by_the_caller(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(create("losses", f"{package}.Loss", trust=["outsider"])).__name__ == "Loss"
    with pytest.raises(UnimetricError, match="--trust"):
        create("losses", f"{package}.Loss")  # trust ends with the call
    with trusting("outsider"):
        assert find("datasets", f"{package}.dataset").__name__ == "dataset"
    monkeypatch.setenv("UNIMETRIC_TRUST", "other, outsider")
    assert find("losses", f"{package}.Loss").__name__ == "Loss"


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("datasets", "system", "defined in `posix`|neither a class nor a function"),
        ("datasets", "Path", r"defined in `pathlib(\._local)?`"),
        ("losses", "Plain", "not a subclass of `torch.nn.Module`"),
        ("losses", "dataset", "not a subclass of `torch.nn.Module`"),
        ("datasets", "os.system", "cannot import `outsider.os`"),
        ("datasets", "absent", "has no `absent`"),
    ],
)
def test_trusted_package_lends_only_its_own_components(kind: str, name: str, says: str, package: str) -> None:
    with pytest.raises(UnimetricError, match=says):
        create(kind, f"{package}.{name}", trust=["outsider"])


def test_pytorch_metric_learning_is_trusted_for_losses_and_miners_only() -> None:
    with pytest.raises(UnimetricError, match="--trust pytorch_metric_learning"):
        find("datasets", "pytorch_metric_learning.utils.common_functions.save_model")
    with pytest.raises(UnimetricError):
        find("losses", "pytorch_metric_learning.utils.common_functions.os.system")


def test_long_dotted_names_are_errors() -> None:
    with pytest.raises(UnimetricError):
        create("losses", "a." * 5000 + "b")


def test_option_trust_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMETRIC_TRUST", "one")
    assert _take_trust(["train", "--trust", "two", "a.toml", "--trust=three"]) == ["train", "a.toml"]
    assert os.environ["UNIMETRIC_TRUST"] == "one,two,three"
    with pytest.raises(UnimetricError, match="--trust"):
        _take_trust(["train", "--trust"])


def test_shipped_configs_need_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    from unimetric.studies.ranges import read_any

    monkeypatch.delenv("UNIMETRIC_TRUST", raising=False)
    folder = Path(sys.modules["unimetric"].__file__ or "").parent / "configs"
    for path in folder.glob("*.toml"):
        load(path)
    for path in (folder / "studies").glob("*.toml"):
        assert read_any(path)
