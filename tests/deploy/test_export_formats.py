"""Exports for other programs: ONNX files that are evaluated like a run, hub folders that timm opens, and programs of torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from unimetric.analysis.calibrate import FILE
from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.config import RunConfig, from_settings
from unimetric.deploy.embedding import Embedder
from unimetric.deploy.export import Comparison, export_as, push_folder
from unimetric.errors import UnimetricError
from unimetric.images.pack import decode
from unimetric.images.table import Table
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed_all
from unimetric.runs.exported import Exportable, embed_files, open_exported
from unimetric.runs.folder import open_run
from unimetric.runs.rows import read_table
from unimetric.spec import create
from unimetric.training.loop import train


@pytest.fixture(scope="module")
def letters_run(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = from_settings(
        {
            "dataset": f"pack(path='{letters}')",
            "transform": "glyphs(size=32)",
            "backbone": "timm(name='test_resnet')",
            "head": "linear(dim=8)",
            "batch_size": 12,
            "metrics": ["recall(k=1)", "map_at_r"],
            "epochs": 1,
            "logger": "none",
            "device": "cpu",
        }
    )
    folder = tmp_path_factory.mktemp("runs") / "letters"
    train(config, folder, quiet=True)
    (folder / FILE).write_text(json.dumps({"fpr": 0.01, "threshold": 0.5, "score": "cosine", "test": {"fpr": 0.02, "fnr": 0.3}}))
    return folder


def comparison(run: Path, **options: Any) -> Comparison:
    config, model = open_run(run)
    given = {"images": 1000, "force": False, "note": lambda text: None, "progress": None} | options
    return Comparison(Exportable(model.eval(), create("transforms", config.transform)).eval(), config, None, **given)


def test_exportable_has_the_crops_of_a_run(letters_run: Path) -> None:
    config, model = open_run(letters_run)
    table, split = read_table(config)
    some = table.take(split.test[:20])
    expected = torch.nn.functional.normalize(embed_all(open_fabric(config), config, model, some))
    found = embed_files(Exportable(model.eval(), create("transforms", config.transform)).eval().embed, some, batch=3)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("size", "resize"), [(32, 40), (33, 33), (40, 32)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_center_crop_equals_torchvision(size: int, resize: int, interpolation: Any) -> None:
    from torchvision.transforms.v2 import functional as V

    from unimetric.images.crops import center_crop
    from unimetric.images.recipe import Recipe

    rng = np.random.default_rng(0)
    none, one = torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    for height, width in ((50, 71), (33, 34), (101, 40), (20, 95)):
        image = torch.from_numpy(rng.integers(0, 256, (1, height, width, 3), dtype=np.uint8))
        found = center_crop(image, none, one, Recipe(size=size, resize=resize, interpolation=interpolation))
        resized = V.resize(image.permute(0, 3, 1, 2).float(), [resize], V.InterpolationMode(interpolation), antialias=True)
        expected = V.center_crop(resized, [size, size]).clamp(0, 255) / 255
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_onnx_file_is_evaluated_like_the_run(letters_run: Path, letters: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "mine.onnx"
    shown = CliRunner().invoke(app, ["export", str(letters_run), "--to", "onnx", "--out", str(out)])
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    assert "recall@1" in shown.output and "evaluate it with" in shown.output
    assert str(letters.parent).encode() not in out.read_bytes()
    config, exported = open_exported(out)
    own = open_run(letters_run)[0]
    assert config.dataset == "pack(path='letters.pack')" and exported.notes["run_id"] == own.run_id
    assert exported.notes["metrics"] == {
        key.removeprefix("test/"): value for key, value in json.loads((letters_run / "done").read_text()).items() if key.startswith("test/")
    }
    assert exported.notes["threshold"]["threshold"] == 0.5 and exported.notes["check"]["largest_difference"] < 1e-5
    said: list[str] = []
    found = evaluate(out, dataset=own.dataset, note=said.append, dims=[4])
    expected = evaluate(letters_run, dims=[4])
    assert found == pytest.approx(expected, abs=1e-3) and "threshold 0.5000" in said[0]
    with pytest.raises(UnimetricError, match=r"letters\.pack"):
        evaluate(out)
    with pytest.raises(UnimetricError, match="contains its `head`"):
        evaluate(out, head="linear(dim=4)")
    with pytest.raises(UnimetricError, match="exists"):
        export_as(letters_run, out, to="onnx")


def test_loss_of_recall_is_refused_unless_forced(letters_run: Path) -> None:
    rng = np.random.default_rng(0)

    def guess(images: np.ndarray) -> np.ndarray:
        return rng.normal(size=(len(images), 8)).astype(np.float32)

    said: list[str] = []
    with pytest.raises(UnimetricError, match=r"loses \d+\.\d\d points of recall@1") as caught:
        comparison(letters_run, note=said.append).check(guess)
    assert "--force" in caught.value.hint and said[0].startswith("recall@1 0.")
    forced = comparison(letters_run, force=True).check(guess)["check"]
    assert forced["recall(k=1)"] < forced["recall(k=1) in torch"] - 0.005
    assert comparison(letters_run, images=0).check(guess) == {}


def test_comparison_takes_whole_classes(letters_run: Path) -> None:
    compared = comparison(letters_run, images=15)
    table, split = compared.data
    rows = compared._rows(table, split)
    labels = table.labels[split.test]
    assert 15 <= len(rows) < len(split.test)
    assert all((table.labels[rows] == label).sum() == (labels == label).sum() for label in np.unique(table.labels[rows]))


def test_lower_precision_requires_images(letters_run: Path, tmp_path: Path) -> None:
    for text in ("onnx(precision='fp16')", "onnx(precision='int8')"):
        with pytest.raises(UnimetricError, match="elsewhere"):
            export_as(letters_run, tmp_path / "mine.onnx", to=text, dataset="pack(path='elsewhere.pack')")
    assert not list(tmp_path.iterdir())


def test_hub_folder_equals_the_run(letters_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    monkeypatch.setattr("unimetric.metrics._measure.FEWEST", 6)  # the run has six test classes
    curve = tmp_path / "shift.json"
    curve.write_text(json.dumps({"methods": {"letters": {"distances": [10.0, 20.0], "scores": {"recall(k=1)": [0.5, 0.25]}}}}))
    out = export_as(letters_run, tmp_path / "hub", to="hub", shift=curve)
    assert sorted(each.name for each in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    opened = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    model = open_run(letters_run)[1].eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(opened.to(memory_format=torch.channels_last)(images), model(images)[0])
        backbone = create("backbones", f"timm(name='local-dir:{out}', pretrained=True)").eval()
        assert torch.equal(backbone.to(memory_format=torch.channels_last)(images), model.backbone(images))
    data = timm.data.resolve_model_data_config(opened)
    assert tuple(data["input_size"]) == (3, 32, 32) and tuple(data["mean"]) == tuple(model.mean)
    card = (out / "README.md").read_text()
    expected = evaluate(letters_run, level=0.95)
    low, high = expected["recall(k=1)/from"], expected["recall(k=1)/to"]
    assert f"| `recall(k=1)` | {expected['recall(k=1)']:.4f} | {low:.4f} to {high:.4f} |" in card
    table, split = read_table(open_run(letters_run)[0])
    assert f"| train images | `{len(split.train)} of {len(set(table.labels[split.train]))} classes` |" in card
    assert "| 20.0 | 0.2500 |" in card and "exceeds 0.5000" in card and "2.00% do, and 30.00%" in card
    assert "random weights" in card and "$" not in card


@pytest.mark.parametrize("geometry", ["cosine", "euclidean", "inner"])
def test_code_of_the_card_reads_images_like_the_run(
    geometry: str, letters_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export_as(letters_run, tmp_path / "hub", to="hub", images=0, geometry=geometry)
    monkeypatch.chdir(out)
    rng, exif = np.random.default_rng(0), Image.Exif()
    exif[0x0112] = 6  # the photo is stored on its side
    for name in ("a.jpg", "b.jpg"):
        noise = rng.integers(0, 256, (5, 8, 3), np.uint8)
        Image.fromarray(noise).resize((80, 50)).save(name, exif=exif)
    found: dict[str, Any] = {}
    exec(Path("README.md").read_text().split("```python")[1].split("```")[0], found)
    config, model = open_run(letters_run)
    expected = Embedder(config, model).embed_images(["a.jpg", "b.jpg"])
    np.testing.assert_allclose(found["embeddings"], expected, atol=0.05 * np.abs(expected).max())


def test_card_has_the_merged_adapter_and_an_untrained_best_epoch(letters_run: Path, tmp_path: Path) -> None:
    given = {"adapter": "last_layers(after='three_quarters')", "head": "identity", "optimizer": "sgd(lr=1e-12)"}
    train(from_settings(asdict(open_run(letters_run)[0]) | given), tmp_path / "run", quiet=True)
    assert json.loads((tmp_path / "run" / "done").read_text())["epoch"] == 0
    card = (export_as(tmp_path / "run", tmp_path / "hub", to="hub", images=0) / "README.md").read_text()
    assert "| adapter | `last_layers(after='three_quarters')` |" in card and "| epochs | `0 of 1` |" in card


def test_hub_rejects_what_timm_cannot_express(config: RunConfig, tmp_path: Path) -> None:
    train(from_settings(asdict(config) | {"epochs": 1}), tmp_path / "run", quiet=True)
    with pytest.raises(UnimetricError, match="requires a network of timm"):
        export_as(tmp_path / "run", tmp_path / "hub", to="hub", images=0)
    assert not (tmp_path / "hub").exists()


def test_hub_rejects_a_network_before_evaluation(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(from_settings(asdict(config) | {"epochs": 1}), tmp_path / "run", quiet=True)
    monkeypatch.setattr("unimetric.deploy.export.evaluate", lambda *_, **__: pytest.fail("the run was evaluated"))
    with pytest.raises(UnimetricError, match="requires a network of timm"):
        export_as(tmp_path / "run", tmp_path / "hub", to="hub")


@pytest.mark.parametrize("scores", [{"recall(k=1)": [0.5]}, {"recall(k=1)": [0.5, "high"]}, [0.5, 0.25], {}, None])
def test_hub_rejects_damaged_curves(scores: Any, letters_run: Path, tmp_path: Path) -> None:
    curve = tmp_path / "shift.json"
    curve.write_text(json.dumps({"methods": {"letters": {"distances": [10.0, 20.0], "scores": scores}}}))
    with pytest.raises(UnimetricError, match="not a report of `unimetric shift`"):
        export_as(letters_run, tmp_path / "hub", to="hub", shift=curve)
    assert not (tmp_path / "hub").exists()


def test_hub_names_an_unreadable_curve_and_its_fix(letters_run: Path, tmp_path: Path) -> None:
    for curve, reason in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UnimetricError) as error:
            export_as(letters_run, tmp_path / "hub", to="hub", shift=curve)
        assert error.value.message == f"{curve}: cannot be read: {reason}"
        assert f"unimetric shift {letters_run} --out shift.json" in error.value.hint
    assert not (tmp_path / "hub").exists()


def test_push_uploads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, Any]] = []

    class Hub:
        def create_repo(self, name: str, *, exist_ok: bool) -> str:
            calls.append(("create", name))
            return f"https://hub/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            calls.append(("upload", (repo_id, folder_path)))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert push_folder(tmp_path, "me/birds") == "https://hub/me/birds"
    assert calls == [("create", "me/birds"), ("upload", ("me/birds", str(tmp_path)))]
    with pytest.raises(UnimetricError, match="must be `owner/name`, got `birds`"):
        push_folder(tmp_path, "birds")


def test_program_of_torch_equals_the_run(letters_run: Path, tmp_path: Path) -> None:
    out = export_as(letters_run, tmp_path / "mine.pt2", to="torch_export", images=15, note=lambda text: None)
    found = {"unimetric.json": ""}
    program = torch.export.load(out, extra_files=found).module()
    assert json.loads(found["unimetric.json"])["check"]["largest_difference"] < 1e-5
    config, model = open_run(letters_run)
    expected = Exportable(model.eval(), create("transforms", config.transform)).eval()
    for count, height, width in ((1, 60, 50), (2, 33, 121), (7, 101, 57), (64, 37, 53)):
        images = torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8)
        torch.testing.assert_close(program(images), expected(images), atol=1e-5, rtol=0)
    with pytest.raises(UnimetricError, match="may run code"):
        evaluate(out)


def test_images_keep_their_order(letters_run: Path) -> None:
    table, _ = read_table(open_run(letters_run)[0])
    some: Table = table.take(np.arange(9))
    found = embed_files(lambda images: images.reshape(len(images), -1)[:, :4].astype(np.float32), some, batch=2)
    for row, path in zip(found, some.paths, strict=True):
        assert row.tolist() == decode(path).reshape(-1)[:4].tolist()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "onnx", "--out", "mine"], "must be a .onnx file"),
        (["--to", "onx", "--out", "mine.onnx"], "no `onx` in formats"),
        (["--out", "mine", "--push", "a/b"], "requires `--to hub`"),
        (["--to", "hub", "--out", "mine", "--push", "birds"], "must be `owner/name`, got `birds`"),
        (["--to", "hub", "--out", "mine", "--push", "me/my birds"], "must be `owner/name`, got `me/my birds`"),
        (["--to", "onnx", "--out", "mine.onnx", "--shift", "shift.json"], "`--shift` requires `--to hub`"),
        (["--out", "mine", "--shift", "shift.json"], "`--shift` requires `--to hub`"),
        (["--out", "mine", "dataset=glyphs"], "requires `--to`"),
    ],
)
def test_export_rejects_invalid_options(words: list[str], problem: str, letters_run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["export", str(letters_run), *words])
    assert isinstance(shown.exception, UnimetricError) and problem in shown.exception.message, shown.output
    assert not list(tmp_path.iterdir())
