"""Indexes: equal to an evaluation, updated by what has changed, and whole after a kill."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from unimetric import Index
from unimetric.analysis.calibrate import FILE
from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.cli.index import _describe_hits
from unimetric.config import load
from unimetric.deploy import building, embedding
from unimetric.deploy.building import build
from unimetric.deploy.export import export_as
from unimetric.deploy.facts import Facts, check_index
from unimetric.deploy.index import Hit
from unimetric.deploy.measuring import calibrate_index, evaluate_index
from unimetric.deploy.placement import Placement
from unimetric.errors import UnimetricError
from unimetric.geometry.pair_scores import PairScores
from unimetric.geometry.space import Space
from unimetric.images.pack import Pack, decode
from unimetric.spec import create
from unimetric.training.loop import train

KILLS = int(os.environ.get("UNIMETRIC_KILLS", "2"))
OLD = 1_600_000_000


@pytest.fixture(scope="module")
def originals(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of letters in one folder per class, written long ago."""
    root = tmp_path_factory.mktemp("originals")
    table = Pack.open(letters).table
    labels = np.unique(table.labels, return_inverse=True)[1]
    for row, path in enumerate(table.paths):
        file = root / f"class {labels[row]:02d}" / f"{row:03d}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(decode(path)).save(file)
        os.utime(file, (OLD, OLD))
    return root


@pytest.fixture(scope="module")
def run(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = load(
        dataset=f"folder(root='{originals}')",
        transform="glyphs(size=32)",
        backbone="small(channels=16)",
        head="linear(dim=8)",
        batch_size=12,
        epochs=1,
        logger="none",
        device="cpu",
    )
    train(config, folder, quiet=True)
    return folder


@pytest.fixture
def images(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals, tmp_path / "images"))


@pytest.fixture
def index(run: Path, images: Path, tmp_path: Path) -> Index:
    return Index.create(run, images, tmp_path / "my.index", labels=True, workers=0)


def content(index: Index) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """All points of an index; an id that is there twice is an error."""
    found: dict[str, tuple[bytes, dict[str, Any]]] = {}
    for ids, vectors, columns in index.store.scan():
        for row, id_ in enumerate(ids):
            assert id_ not in found
            found[id_] = (vectors[row].tobytes(), {name: values[row] for name, values in columns.items()})
    assert len(index) == len(found) == index.facts.count
    return found


# --- embedding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["test", "train"])
def test_embeddings_equal_those_of_evaluate_bit_for_bit(run: Path, index: Index, images: Path, tmp_path: Path, part: str) -> None:
    evaluate(run, part=part, save=tmp_path / "saved.npz", dataset=f"folder(root='{images}')")
    saved = np.load(tmp_path / "saved.npz")
    ids = [os.path.relpath(path, images) for path in saved["paths"]]
    assert len(ids) == len(index) / 2 == 72
    expected = Space(torch.from_numpy(saved["embeddings"]), torch.from_numpy(saved["labels"])).points.numpy()
    assert np.array_equal(index.store.vectors(ids), expected)
    assert np.array_equal(index.embed(saved["paths"][:64].tolist()), saved["embeddings"][:64])  # two full batches
    assert index.fetch(ids)["label"] == saved["names"].tolist()


@pytest.mark.parametrize(
    ("adapter", "backbone", "near"),
    [
        ("last_layers", "small(channels=16)", 0.0),
        ("linear_probe", "small(channels=16)", 0.0),
        ("lora(rank=4)", "timm(name='test_vit', image_size=32)", 1e-5),  # a merged update is rounded
        ("puma(rank=4, lora_rank=4)", "timm(name='test_vit', image_size=32)", 0.0),  # cannot be merged
    ],
)
def test_index_of_adapted_run_equals_evaluate(run: Path, images: Path, tmp_path: Path, adapter: str, backbone: str, near: float) -> None:
    config = load(run / "config.toml", adapter=adapter, backbone=backbone, optimizer="adam(lr=1e-2)")
    adapted, path = tmp_path / "adapted", tmp_path / "my.index"
    train(config, adapted, quiet=True)
    counts = [build(adapted, images, path, workers=0)["added"] for _ in range(2)]
    assert counts == [144, 0] and load(path / "model" / "config.toml").adapter == (adapter if "puma" in adapter else "")
    evaluate(adapted, save=tmp_path / "saved.npz", dataset=f"folder(root='{images}')")
    saved = np.load(tmp_path / "saved.npz")
    expected = Space(torch.from_numpy(saved["embeddings"]), torch.from_numpy(saved["labels"])).points.numpy()
    with Index.open(path) as index:
        found = index.store.vectors([os.path.relpath(each, images) for each in saved["paths"]])
    assert np.allclose(found, expected, rtol=0, atol=near)


def test_workers_and_batches_change_no_bit(run: Path, index: Index, images: Path, tmp_path: Path) -> None:
    other = Index.create(run, images, tmp_path / "other.index", labels=True, workers=2)
    assert content(other) == content(index)


def test_batches_that_processes_read_in_parts_change_no_bit(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "_CHUNK", 8)  # a batch of 50 in parts of 7 and 8; the last one has 45 files
    (images / "broken.jpg").write_bytes(b"no image")
    found = [Index.create(run, images, tmp_path / f"{workers}.index", workers=workers, evaluate_batch=50) for workers in (0, 2)]
    assert len(found[0]) == 144 and found[0].unreadable() == found[1].unreadable() != []
    assert content(found[0]) == content(found[1])


def test_search_finds_the_query_and_its_columns(index: Index, images: Path) -> None:
    path = images / "class 03" / sorted(os.listdir(images / "class 03"))[0]
    pixels = np.array(Image.open(path).convert("RGB"))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.open(path).rotate(180).save(turned := images.parent / "turned.png", exif=exif)
    for query in (str(path), path, Image.open(path), pixels, turned, Image.open(turned)):
        hits = index.search(query, k=3)
        assert hits[0].id == os.path.relpath(path, images) and hits[0].path == str(path)
        assert hits[0].score == pytest.approx(1, abs=1e-5) and hits[0].known is None and hits[0].columns == {"label": "class 03"}
    several = index.search([path, pixels], k=1000, where={"label": "class 05"})
    assert [len(hits) for hits in several] == [12, 12] and {hit.columns["label"] for hit in several[0]} == {"class 05"}
    assert [hit.score for hit in several[0]] == sorted((hit.score for hit in several[0]), reverse=True)
    ids, scores = index.search_vectors(index.embed([path]), k=2, where="label = 'class 05' or label like 'class 1%'")
    assert ids.shape == scores.shape == (1, 2) and index.image_path(ids[0, 0]).startswith(str(images))
    assert index.search([]) == []


@pytest.mark.parametrize("k", ["3", 2.5, None, True, 0])
def test_search_rejects_wrong_numbers_of_images(index: Index, images: Path, k: Any) -> None:
    vectors = np.ones((1, index.facts.dim), np.float32)
    for search in (
        lambda: index.search(images / "absent.png", k=k),
        lambda: index.search_vectors(vectors, k),
        lambda: index.search_hits(vectors, k),
    ):
        with pytest.raises(UnimetricError, match=f"`k` must be .*, got {k!r}"):
            search()


def test_search_equals_brute_force(index: Index, images: Path) -> None:
    points = {id_: np.frombuffer(vector, np.float32) for id_, (vector, _) in content(index).items()}
    query = index.embed(sorted(images.rglob("*.png"))[::20])
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    scores = query @ np.stack(list(points.values())).T
    assert np.allclose(index.search_vectors(query, 5)[1], -np.sort(-scores, axis=1)[:, :5], atol=1e-6)


def test_search_repeats_if_a_hit_is_deleted_meanwhile(index: Index, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = index.embed([index.image_path(next(index.store.scan())[0][0])])
    before = [hit.id for hit in index.search_hits(query, 3)[0]]
    search = index.store.search

    def search_and_delete(*arguments: Any) -> Any:
        found = search(*arguments)
        index.store.delete(before[:1])  # as another program does
        return found

    monkeypatch.setattr(index.store, "search", search_and_delete)
    found = [hit.id for hit in index.search_hits(query, 3)[0]]
    assert found[:2] == before[1:] and len(found) == 3


def test_file_urls_are_local_paths(run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "my index"
    with Index.create(run.as_uri(), images.as_uri(), place.as_uri(), workers=0) as made:
        assert made.path == place and made.facts.source == str(images) and len(made) == 144
        assert made.update(images.as_uri(), workers=0) == {"added": 0, "changed": 0, "deleted": 0, "unreadable": 0}
        query = next(images.rglob("*.png"))
        assert made.search(query.as_uri(), k=1) == made.search(query, k=1)
    with Index.open(place.as_uri()) as opened:
        assert len(opened) == 144
    with pytest.raises(UnimetricError, match=r"an absolute path of this machine, got `file://my.index`"):
        Index.open("file://my.index")
    assert not (tmp_path / "file:").exists()


def test_index_opens_without_the_run(run: Path, images: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "gone"))
    first = Index.create(moved, images, tmp_path / "my.index", workers=0)
    query = sorted(images.rglob("*.png"))[7]
    before = first.search(query)
    shutil.rmtree(moved)
    assert Index.open(tmp_path / "my.index").search(query) == before
    assert "label" not in first.columns  # classes only when asked for


@pytest.mark.parametrize("geometry", ["inner", "euclidean"])
def test_other_geometries_rank_as_space_does(run: Path, images: Path, tmp_path: Path, geometry: str) -> None:
    index = Index.create(run, images, tmp_path / "my.index", labels=True, workers=0, geometry=geometry)
    assert index.facts.placement.geometry == geometry and index.facts.placement.scale > 0
    paths = sorted(images.rglob("*.png"))
    raw = torch.from_numpy(index.embed(paths))
    _, scores = Space(raw, torch.arange(len(raw)), geometry=geometry).neighbors(5, scores=True)
    ids, found = index.search_vectors(raw.numpy(), 6)
    for row, path in enumerate(paths):
        own = os.path.relpath(path, images)
        others = [(id_, score) for id_, score in zip(ids[row], found[row], strict=True) if id_ != own][:5]
        assert np.allclose([score for _, score in others], scores[row], rtol=1e-4, atol=1e-4)
    if geometry == "euclidean":
        assert found[:, 0] == pytest.approx(0, abs=1e-4) and len(index.facts.placement.center) == 8
    numbers = evaluate_index(index, metrics=["recall(k=1)"])
    assert numbers["exact"]["recall(k=1)"] == pytest.approx(numbers["store"]["recall(k=1)"], abs=0.02)


def test_poincare_placement_ranks_as_space_does() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(80, 6, generator=generator)
    points = points / points.norm(dim=1, keepdim=True) * torch.rand(80, 1, generator=generator) * 2.5
    placement = Placement("poincare", 0.1).fitted(points)
    vectors, valid = placement.vectors(points)
    assert valid.all() and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert np.allclose(placement.points(vectors), points, atol=1e-5)
    space = Space(points, torch.arange(80), geometry="poincare", curvature=0.1)
    near, scores = space.neighbors(4, scores=True)
    similarity = placement.queries(points) @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    found = np.argsort(-similarity, axis=1)[:, :4]
    assert np.array_equal(found, near.numpy())
    for row in range(80):
        assert np.allclose(placement.scores(points[row], vectors[found[row]]), scores[row], atol=1e-4)


def test_timm_backbone_with_weights_is_a_model(images: Path, tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), tmp_path / "net.safetensors")
    spec = f"timm(name='test_resnet', weights='{tmp_path}/net.safetensors')"
    index = Index.create(spec, images, tmp_path / "my.index", workers=0, transform="base(size=32, resize=32)")
    (tmp_path / "net.safetensors").unlink()
    path = sorted(images.rglob("*.png"))[0]
    assert Index.open(tmp_path / "my.index").search(path)[0].path == str(path)
    assert index.facts.transform == "base(size=32, resize=32)" and str(tmp_path) not in (index.path / "model/config.toml").read_text()
    with pytest.raises(UnimetricError, match="weights are random"):
        Index.create("timm(name='test_resnet')", images, tmp_path / "other.index")
    with pytest.raises(UnimetricError, match="weights are random") as raised:
        Index.create("small(channels=16)", images, tmp_path / "other.index")
    assert "unimetric train" in raised.value.hint
    assert not (tmp_path / "other.index").exists()


# --- updates -----------------------------------------------------------------------------------------------------------


def letter(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    os.utime(path, (OLD, OLD + seed))


def test_update_touches_only_what_has_changed(index: Index, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded: list[int] = []
    embed = building.Embedder.embed
    monkeypatch.setattr(building.Embedder, "embed", lambda self, crops: embedded.append(len(crops)) or embed(self, crops))
    before, version = content(index), index.version
    assert index.update(workers=0) == {"added": 0, "changed": 0, "deleted": 0, "unreadable": 0}
    paths = sorted(images.rglob("*.png"))
    for path in paths[:5]:
        os.utime(path)  # touched, not changed
    assert index.update(workers=0)["changed"] == 0 and not embedded and index.version == version
    letter(images / "new" / "ä.png", 1)
    letter(paths[3], 2)
    paths[4].unlink()
    other = Index.open(index.path)
    assert index.update(workers=0) == {"added": 1, "changed": 1, "deleted": 1, "unreadable": 0}
    assert len(embedded) == 1  # one batch
    assert other.version == index.version != version and len(other) == 144
    assert other.refresh() and not other.refresh() and content(other) == content(index)
    after = content(index)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"new/ä.png", *(os.path.relpath(paths[row], images) for row in (3, 4))}
    fresh = Index.create(index.path / "model", images, index.path.parent / "fresh.index", labels=True, workers=0)
    assert {key: value[1] for key, value in content(fresh).items()} == {key: value[1] for key, value in after.items()}
    for key, (vector, _) in content(fresh).items():
        assert np.allclose(np.frombuffer(vector, np.float32), np.frombuffer(after[key][0], np.float32), atol=1e-6)


def test_update_opens_its_model_once_and_if_needed(run: Path, index: Index, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    for name in ("open_own", "open_model"):
        original = getattr(building, name)
        monkeypatch.setattr(building, name, lambda *args, name=name, original=original: opened.append(name) or original(*args))
    assert build(run, images, index.path, workers=0)["added"] == 0 and not opened
    letter(images / "new" / "1.png", 1)
    assert build(run, images, index.path, workers=0)["added"] == 1 and opened == ["open_own"]
    with pytest.raises(UnimetricError, match="nonsense"):
        build(run, images, index.path, workers=0, nonsense=1)
    (index.path / "model" / "model.safetensors").write_bytes(b"damaged")
    letter(images / "new" / "2.png", 2)
    before = (index.path / "index.toml").read_text()
    with pytest.raises(UnimetricError, match=r"model/model\.safetensors: unreadable"):
        build(run, images, index.path, workers=0)
    assert (index.path / "index.toml").read_text() == before


def test_update_embeds_new_images_in_one_batch(index: Index, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded: list[int] = []
    embed = building.Embedder.embed
    monkeypatch.setattr(building.Embedder, "embed", lambda self, crops: embedded.append(len(crops)) or embed(self, crops))
    for count in (20, 3):
        for path in sorted(images.rglob("*.png"))[::5]:
            os.utime(path)  # read again, but not embedded
        for row in range(count):
            letter(images / f"class {count}" / f"{row}.png", row)
        assert index.update(workers=0) == {"added": count, "changed": 0, "deleted": 0, "unreadable": 0}
    assert len(embedded) == 2


@pytest.mark.parametrize("delay", [0.0, building._RACE / 1e9])
def test_file_changed_within_its_time_stamp_is_found(
    run: Path, images: Path, tmp_path: Path, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sorted(images.rglob("*.png"))[0]
    write = building._Build.write
    monkeypatch.setattr(building._Build, "write", lambda *args: time.sleep(delay) or write(*args))  # the file is read before
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    index = Index.create(run, images, tmp_path / "my.index", workers=0)
    data = path.read_bytes()
    other = sorted(images.rglob("*.png"))[30].read_bytes()
    path.write_bytes(other[: len(data)].ljust(len(data), b"\0"))  # the same size
    os.utime(path, ns=(now, now))
    counts = index.update(workers=0)
    assert counts["changed"] + counts["deleted"] == 1


def test_unreadable_images_are_listed_and_not_fatal(run: Path, images: Path, tmp_path: Path) -> None:
    jpeg = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(jpeg)
    (images / "truncated.jpg").write_bytes(jpeg.read_bytes()[:-600])
    (images / "empty.png").write_bytes(b"")
    (images / "text.webp").write_text("not an image")
    Image.new("RGB", (200_000, 1)).save(images / "narrow.png")
    huge = bytearray((images / "narrow.png").read_bytes())
    huge[16:24] = (60_000).to_bytes(4, "big") * 2  # its header claims 3.6 gigapixels
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    (images / "huge.png").write_bytes(bytes(huge))
    frames = [Image.fromarray(np.full((40, 40, 3), value, np.uint8)) for value in (40, 200)]
    frames[0].save(images / "animated.gif", save_all=True, append_images=frames[1:])
    (images / "link.png").symlink_to(tmp_path / "nothing.png")
    os.symlink(images, images / "loop")
    index = Index.create(run, images, tmp_path / "my.index", workers=0)
    reasons = dict(index.unreadable())
    assert set(reasons) == {"truncated.jpg", "empty.png", "text.webp", "narrow.png", "huge.png", "link.png"} and len(index) == 145
    assert "truncated" in reasons["truncated.jpg"] and "megapixels" in reasons["huge.png"] and "narrow" in reasons["narrow.png"]
    assert reasons["link.png"] == "there is no such image" and index.facts.unreadable == 6
    assert index.search(images / "animated.gif", k=1)[0].id == "animated.gif"
    for name in ("truncated.jpg", "huge.png", "narrow.png", "text.webp", "none.jpg"):
        with pytest.raises(UnimetricError, match=name.replace(".", r"\.")):
            index.search(images / name)
    assert index.update(workers=0)["unreadable"] == 6
    shutil.copy(jpeg, images / "truncated.jpg")
    (images / "animated.gif").write_bytes(b"broken")
    assert index.update(workers=0) == {"added": 1, "changed": 0, "deleted": 1, "unreadable": 6}
    assert {"truncated.jpg"} == content(index).keys() & {"truncated.jpg", "animated.gif"}


def test_unreadable_names_are_read_as_they_are(run: Path, images: Path, tmp_path: Path) -> None:
    names = ["a\tb.png", "a\nb.png", "a\u2028b.png", "a\rb.png", '"a".png', "ä\\t.png"]
    for name in names:
        try:
            (images / name).write_bytes(b"")
        except OSError:
            pytest.skip("this file system has fewer names")
    with Index.create(run, images, tmp_path / "my.index", workers=0) as index:
        assert sorted(name for name, _ in index.unreadable()) == sorted(names)
        assert len({reason for _, reason in index.unreadable()}) == 1
        lines = (index.path / "unreadable.txt").read_bytes().decode().split("\n")[:-1]
        assert len(lines) == 6 and any(line.startswith("ä\\t.png\t") for line in lines)
        (index.path / "unreadable.txt").write_text('"a".png\tis empty\n')  # of an earlier version
        assert index.unreadable() == [('"a".png', "is empty")]


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [
        ("missing.csv", ["missing.jpg", "missing.png"], r"got 0 of 2; `missing\.jpg`: there is no such image"),
        ("twice.csv", ["a.jpg", "a.jpg"], r"`a\.jpg` is listed twice"),
        ("empty.csv", [], "has no images"),
    ],
)
def test_index_that_stores_no_image_is_removed(run: Path, tmp_path: Path, name: str, lines: list[str], problem: str) -> None:
    (tmp_path / name).write_text("\n".join(["path", *lines]))
    with pytest.raises(UnimetricError, match=problem):
        build(run, tmp_path / name, tmp_path / "my.index", workers=0)
    assert os.listdir(tmp_path) == [name]


def test_index_of_names_that_are_not_utf8_is_removed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    try:
        (tmp_path / "images" / os.fsdecode(b"\xff.png")).touch()
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    with pytest.raises(UnimetricError, match=r"got 0 of 1; .*its name is not UTF-8"):
        build(run, tmp_path / "images", tmp_path / "my.index", workers=0)
    assert os.listdir(tmp_path) == ["images"]


def test_build_interrupted_before_its_model_is_written_leaves_nothing(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    before = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(building, "_open_merged", stop)
        build(run, images, tmp_path / "my.index", workers=0)
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(KeyboardInterrupt):
        build(run, images, tmp_path / "my.index", workers=0, progress=stop)
    assert check_index(tmp_path / "my.index")  # resumed without another model


def test_failed_build_keeps_stored_images(run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_SHARD", 32)

    def fail(done: int, total: int) -> None:
        if done == 96:
            raise UnimetricError("stopped")

    with pytest.raises(UnimetricError, match="stopped"):
        build(run, images, tmp_path / "my.index", workers=0, progress=fail)
    assert build(run, images, tmp_path / "my.index", workers=0)["added"] == 144 - 64  # the third shard was not recorded
    with Index.open(tmp_path / "my.index") as index:
        assert len(content(index)) == 144


def test_damaged_index_can_be_removed_as_hinted(run: Path, index: Index, images: Path) -> None:
    (index.path / "index.toml").write_text("damaged")
    with pytest.raises(UnimetricError, match=r"index\.toml: cannot be read") as caught:
        build(run, images, index.path, workers=0)
    assert "remove its folder and build it again" in caught.value.hint


def test_damaged_ledger_is_one_sentence(run: Path, index: Index, images: Path) -> None:
    file = index.path / "files.db"
    data = file.read_bytes()
    file.write_bytes(data[:4096] + bytes(len(data) - 4096))  # the first page has the names of the tables
    with pytest.raises(UnimetricError, match=r"files\.db: cannot be used: .*malformed") as caught:
        build(run, images, index.path, workers=0)
    assert "remove its folder and build it again" in caught.value.hint
    assert b"tablefilesfiles" in data
    for old, new in ((b"tablefilesfiles", b"tablefil\xffsfiles"), (b"000.png", b"0\xff0.png")):  # a name of a table, and of a file
        file.write_bytes(data.replace(old, new))
        with pytest.raises(UnimetricError, match=r"files\.db: cannot be (opened|used)") as caught:
            build(run, images, index.path, workers=0)
        assert "remove its folder and build it again" in caught.value.hint


def test_csv_columns_are_typed_filtered_and_updated(run: Path, images: Path, tmp_path: Path) -> None:
    paths = [os.path.relpath(path, tmp_path) for path in sorted(images.rglob("*.png"))[:40]]
    file = tmp_path / "images.csv"

    def write(price: Callable[[int], Any], rows: int = 40) -> None:
        lines = [f"{path},{row % 4},{price(row)},{str(row % 2 == 0).lower()},größe {row}" for row, path in enumerate(paths[:rows])]
        file.write_text("\n".join(["path,label,price,sale,note", *lines, "images/missing.png,1,,,"]))

    write(lambda row: row if row % 5 else "")
    index = Index.create(run, file, tmp_path / "my.index", workers=0)
    assert index.columns == {"label": str, "price": int, "sale": bool, "note": str}
    assert index.unreadable() == [("images/missing.png", "there is no such image")]
    hits = index.search(images.parent / paths[0], k=100, where="price < 20 and sale and not label = '2'")
    assert sorted(hit.columns["price"] for hit in hits) == [4, 8, 12, 16]
    assert len(index.search(images.parent / paths[0], k=100, where={"price": None})) == 8
    vectors = {key: value[0] for key, value in content(index).items()}
    write(lambda row: 7 if row == 3 else row if row % 5 else "", rows=39)
    assert index.update(workers=0) == {"added": 0, "changed": 1, "deleted": 1, "unreadable": 1}
    assert index.fetch([paths[3]]) == {"label": ["3"], "price": [7], "sale": [False], "note": ["größe 3"]}
    assert {key: value[0] for key, value in content(index).items()} == {key: vectors[key] for key in paths[:39]}
    before = content(index)
    write(lambda row: "cheap" if row == 2 else row)
    with pytest.raises(UnimetricError, match=r"line 4: `price` must hold integers, got `cheap`"):
        index.update(workers=0)
    file.write_text(f"path\n{paths[0]}\n{paths[0]}\n")
    with pytest.raises(UnimetricError, match="is listed twice"):
        index.update(workers=0)
    assert content(Index.open(index.path)) == before


def test_text_column_stays_text_and_empty_one_gets_a_type(run: Path, images: Path, tmp_path: Path) -> None:
    first, second = (os.path.relpath(path, tmp_path) for path in sorted(images.rglob("*.png"))[:2])
    file = tmp_path / "images.csv"
    file.write_text(f"path,code,price\n{first},A1,\n{second},7,\n")
    index = Index.create(run, file, tmp_path / "my.index", workers=0)
    file.write_text(f"path,code,price\n{first},08,5\n{second},7,6\n")
    assert index.update(workers=0)["changed"] == 2 and index.columns == {"code": str, "price": int}
    file.write_text(f"path,code,price\n{first},8,5\n{second},7,6\n")
    assert index.update(workers=0)["changed"] == 1
    assert index.fetch([first, second]) == {"code": ["8", "7"], "price": [5, 6]}


@pytest.mark.parametrize(
    ("spec", "stored"),
    [
        ("files('images')", "files(root={0!r})"),
        ("folder(root='images', train=0.5)", "folder(root={0!r}, train=0.5)"),
        ("union(parts=['files(root=\"images\")'])", "union(parts=[{1!r}])"),
        ("csv(file='images.csv')", "csv(file={2!r})"),
    ],
)
def test_dataset_is_read_from_another_folder(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, stored: str
) -> None:
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(images.rglob("*.png"))]
    (tmp_path / "images.csv").write_text("\n".join(["path,label", *rows]))
    monkeypatch.chdir(tmp_path)
    with Index.create(run, spec, tmp_path / "my.index", workers=0) as index:
        assert index.facts.source == stored.format(str(images), f"files(root={str(images)!r})", str(tmp_path / "images.csv"))
        monkeypatch.chdir("/")
        assert index.update(workers=0) == {"added": 0, "changed": 0, "deleted": 0, "unreadable": 0}


def test_column_of_a_failed_update_has_no_type_yet(run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    name, file = os.path.relpath(min(images.rglob("*.png")), tmp_path), tmp_path / "images.csv"
    file.write_text(f"path,price\n{name},3\n")
    index = Index.create(run, file, tmp_path / "my.index", workers=0)
    file.write_text(f"path,price,code\n{name},3,7\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(building.Ledger, "mark_columns", die)
        index.update(workers=0)
    file.write_text(f"path,price,code\n{name},3,A7\n")
    assert index.update(workers=0)["changed"] == 1
    assert index.fetch([name]) == {"price": [3], "code": ["A7"]} and index.facts.columns == {"price": "int", "code": "str"}


def test_wrong_source_deletes_nothing(index: Index, images: Path, tmp_path: Path) -> None:
    before = content(index)
    letter(tmp_path / "other" / "a.png", 1)
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "other", tmp_path / "empty"):
        with pytest.raises(UnimetricError, match="nothing was deleted") as caught:
            index.update(source, workers=0)
        assert str(images) in caught.value.hint
    with pytest.raises(UnimetricError, match="no such folder, csv file or dataset"):
        index.update(tmp_path / "nowhere", workers=0)
    assert content(Index.open(index.path)) == before and Index.open(index.path).facts.source == str(images)
    moved, opened = Path(shutil.copytree(images, tmp_path / "moved")), Index.open(index.path)
    version = opened.version
    assert index.update(moved, workers=0)["added"] == 0 and opened.version != version  # a server must read the new paths
    assert index.search(next(moved.rglob("*.png")), k=1)[0].path.startswith(str(moved))


def test_rejected_column_leaves_an_index_that_can_be_updated(run: Path, images: Path, tmp_path: Path) -> None:
    name, file = os.path.relpath(min(images.rglob("*.png")), tmp_path), tmp_path / "images.csv"
    file.write_text(f"path\n{name}\n")
    index = Index.create(run, file, tmp_path / "my.index", workers=0)
    for column in ("_id", "x" * 64):
        file.write_text(f"path,{column}\n{name},3\n")
        with pytest.raises(UnimetricError, match="name of a column"):
            index.update(workers=0)
    file.write_text(f"path,a\x7fb\n{name},3\n")  # TOML requires an escape for this character
    assert index.update(workers=0)["changed"] == 1 and Index.open(index.path).columns == {"a\x7fb": int}


def test_index_inside_its_source_skips_uploads(run: Path, images: Path) -> None:
    with Index.create(run, images, images / "my.index", workers=0) as index:
        letter(index.path / "feedback" / "1.png", 1)
        letter(images / "feedback" / "1.png", 1)
        assert index.update(workers=0)["added"] == 1 and len(index) == 145


def test_rejects_other_models_stores_and_newer_files(run: Path, index: Index, images: Path, tmp_path: Path) -> None:
    before = content(index)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    config = load(other / "config.toml", seed=5)
    shutil.rmtree(other)
    train(config, other, quiet=True)
    with pytest.raises(UnimetricError, match="was built by another model"):
        Index.create(other, images, index.path)
    with pytest.raises(UnimetricError, match=r"was built with `--store \"flat\"`"):
        Index.create(run, images, index.path, store="flat(dtype='int8')")
    with pytest.raises(UnimetricError, match=r"was built with `transform = 'glyphs\(size=32\)'`, got 'glyphs\(size=16\)'"):
        Index.create(run, images, index.path, transform="glyphs(size=16)")
    with pytest.raises(UnimetricError, match=r"shape \(Q, 8\) of the index's model, got float32 \(1, 9\)"):
        index.search_vectors(np.ones((1, 9), np.float32))
    for ragged in ([[1.0] * 8, [1.0] * 7], [np.ones(8), np.ones((8, 2))]):
        with pytest.raises(UnimetricError, match=r"shape \(Q, 8\) of the index's model, got rows of different lengths"):
            index.search_vectors(ragged)
    with pytest.raises(UnimetricError, match="finite and not zero"):
        index.search_vectors(np.zeros((1, 8), np.float32))
    some = sorted(images.rglob("*.png"))[:2]
    index.embed = lambda queries: np.array([[1.0] * 8, [0.0] * 8], np.float32)[: len(queries)]
    with pytest.raises(UnimetricError, match=f"^{re.escape(str(some[1]))}: its embedding is zero"):
        index.search(some)
    del index.embed
    assert len(index.search(next(images.rglob("*.png")), k=2**62)) == 144
    for value in ("NaN", "1e999"):
        (index.path / "thresholds.json").write_text(f'{{"threshold": {value}, "fpr": 0.01}}')
        with pytest.raises(UnimetricError, match=r"thresholds\.json: cannot be read: .* must be finite"):
            Index.open(index.path)
    (index.path / "thresholds.json").unlink()
    for where in ("label ==", "labels = 'a'", "label = 3", "label = 'a'; drop table x", {"size": 3}):
        with pytest.raises(UnimetricError):
            index.search(next(images.rglob("*.png")), where=where)
    assert content(index) == before
    text = (index.path / "index.toml").read_text()
    for old, new, problem in (
        ("format = 1", "format = 9", "newer"),
        ("dim = 8", "dim = 16", "8 dimensions, not 16"),
        ("count", "cound", "count"),
        ('runtime = "torch"', 'runtime = "tvm"', "unknown runtime"),
    ):
        (index.path / "index.toml").write_text(text.replace(old, new, 1))
        with pytest.raises(UnimetricError, match=problem):
            len(Index.open(index.path))
    (index.path / "index.toml").write_text(text.replace('runtime = "torch"', "", 1))  # as an earlier version wrote it
    shutil.copytree(other, index.path / "model", dirs_exist_ok=True)
    with pytest.raises(UnimetricError, match="is not the model that has built the index"):
        Index.open(index.path).embed([next(images.rglob("*.png"))])
    with pytest.raises(UnimetricError, match="not an index"):
        Index.open(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(UnimetricError, match="exists and is not an index"):
        Index.create(run, images, tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["letter.txt"]


def test_full_disk_leaves_the_index_unchanged(index: Index, images: Path, small_disk: Callable[[], AbstractContextManager[None]]) -> None:
    before = content(index)
    for row in range(150):
        letter(images / "new" / f"{row}.png", row)
    with small_disk(), pytest.raises(UnimetricError, match=r"disk is full|cannot be written"):
        index.update(workers=0)
    again = Index.open(index.path)
    assert {key: again.store.vectors([key]).tobytes() for key in before} == {key: value[0] for key, value in before.items()}
    assert index.update(workers=0)["added"] == 150 and len(content(index)) == 294


# --- kills -------------------------------------------------------------------------------------------------------------


def _count_writes(moment: int = 0, delay: float = 0.0) -> Callable[[], int]:
    """Count the writes to the disk, and kill this process some seconds after one of them begins."""
    fsync, count = os.fsync, 0

    def counted(handle: Any) -> None:
        nonlocal count
        count += 1
        if count == moment and not delay:
            os.kill(os.getpid(), signal.SIGKILL)
        if count == moment:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        fsync(handle)

    os.fsync = counted
    return lambda: count


def _build_and_die(model: Path, source: Path, path: Path, moment: int, delay: float) -> None:
    _count_writes(moment, delay)
    build(model, source, path, labels=True, workers=0)


def test_killed_builds_and_updates_end_as_unbroken_ones(run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_SHARD", 32)
    monkeypatch.setattr(os, "fsync", os.fsync)  # restored at the end
    writes = _count_writes()
    build(run, images, tmp_path / "unbroken.index", labels=True, workers=0)
    total = writes()
    rng, fork = random.Random(1), multiprocessing.get_context("fork")
    broken = tmp_path / "broken.index"
    for killed in range(KILLS):
        if killed == (KILLS + 1) // 2:  # the second half of the kills hits an update
            _end_as_unbroken(run, images, broken, tmp_path / "unbroken.index")
            _change(images)
            build(None, images, tmp_path / "unbroken.index", workers=0)
        while True:
            if check_index(broken) and Facts.read(broken).state == "ready" and killed < (KILLS + 1) // 2:
                shutil.rmtree(broken)  # this build was not killed
            elif check_index(broken) and Facts.read(broken).state == "ready":
                letter(images / "new" / "1.png", int(rng.random() * 10**6))
                build(None, images, tmp_path / "unbroken.index", workers=0)
            moment, delay = rng.randint(1, rng.choice([4, total])), rng.choice([0.0, rng.uniform(0, 0.02)])
            process = fork.Process(target=_build_and_die, args=(run, images, broken, moment, delay))
            process.start()
            process.join()
            if check_index(broken):
                content_of_unfinished(Index.open(broken))
            if process.exitcode == -signal.SIGKILL:
                break
            assert process.exitcode == 0
    _end_as_unbroken(run, images, broken, tmp_path / "unbroken.index")


@pytest.mark.parametrize("store", ["flat", "lance(recall=0.9)"])
def test_update_that_was_killed_and_undone_leaves_no_trace(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """The store was written, the ledger was not, and then the files are those of before."""
    if store != "flat":
        pytest.importorskip("lancedb", reason="pip install 'unimetric[lance]'")
    rows = [f"images/{path.relative_to(images)}" for path in sorted(images.rglob("*.png"))]
    listed, backup, path = tmp_path / "images.csv", tmp_path / "backup", tmp_path / "my.index"

    def write_list(names: list[str], price: int) -> None:
        listed.write_text("path,price\n" + "".join(f"{name},{price}\n" for name in names))

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    write_list(rows, 1)
    with Index.create(run, listed, path, store=store, workers=0) as index:
        before = content(index)
    shutil.copytree(images, backup)
    letter(images / "wrong.png", 1)
    for name in rows[:2]:  # another content and an unreadable one of the same size
        shutil.copy(tmp_path / rows[-1], tmp_path / name)
    (tmp_path / rows[1]).write_bytes(b"?" * (tmp_path / rows[1]).stat().st_size)
    for method, names, price in (("record", [*rows, "images/wrong.png"], 1), ("forget", rows[4:], 1), ("record_columns", rows, 2)):
        write_list(names, price)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(building.Ledger, method, die)
            build(None, listed, path, workers=0)
        shutil.rmtree(images)
        shutil.copytree(backup, images)
        write_list(rows, 1)
        assert build(None, listed, path, workers=0)["unreadable"] == 0
        with Index.open(path) as index:
            assert content(index) == before


def test_resumed_build_deletes_what_became_unreadable(run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    path, broken = tmp_path / "my.index", min(images.rglob("*.png"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(building.Ledger, "record", die)
        build(run, images, path, workers=0)
    broken.write_bytes(b"")
    assert build(run, images, path, workers=0) == {"added": 143, "changed": 0, "deleted": 0, "unreadable": 1}
    with Index.open(path) as index:
        assert len(content(index)) == 143 and str(broken.relative_to(images)) not in content(index)


def test_second_build_that_starts_meanwhile_is_rejected(run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that reads the facts of an index before another one changes them would overwrite them."""
    path, opened, codes = tmp_path / "my.index", building.open_source, []

    def open_late(*args: Any, **options: Any) -> Any:
        if not codes:
            other = multiprocessing.get_context("fork").Process(target=opened_build, args=(run, images, path))
            other.start()
            other.join()
            codes.append(other.exitcode)
        return opened(*args, **options)

    def opened_build(*args: Any) -> None:
        building.open_source = opened
        build(*args, workers=0)

    for number in range(2):  # a new index, and an update
        codes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(building, "open_source", open_late)
            build(run, images, path, workers=0)
        with Index.open(path) as index:
            assert codes == [1] and index.facts.generation == number + 1
            assert len(content(index)) == 144 + number and len(index.embed([min(images.rglob("*.png"))])) == 1
        letter(images / "new.png", 1)


def _change(images: Path) -> None:
    paths = sorted(images.rglob("*.png"))
    for row, path in enumerate(paths):
        if row % 3 == 0:
            letter(path, row)
        elif row % 7 == 0:
            path.unlink()
    for row in range(40):
        letter(images / "new" / f"{row}.png", 1000 + row)


def _end_as_unbroken(run: Path, images: Path, broken: Path, unbroken: Path) -> None:
    build(run, images, broken, labels=True, workers=0)
    with Index.open(broken) as first, Index.open(unbroken) as second:
        assert first.facts.state == "ready" and content(first) == content(second)
        assert first.unreadable() == second.unreadable() == []


def content_of_unfinished(index: Index) -> None:
    """An index that was killed opens, and holds nothing twice."""
    ids = [id_ for some, _, _ in index.store.scan() for id_ in some]
    assert len(ids) == len(set(ids)) == len(index)


# --- size, metrics and commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["flat", "flat(dtype='float16')"])
def test_finished_index_is_small(tmp_path: Path, store: str) -> None:
    """Store and ledger together, for short vectors, where names weigh most."""
    from unimetric.datasets.files import ImageFile
    from unimetric.deploy.ledger import Ledger

    points = create("stores", store, path=str(tmp_path / "store"), dim=128)
    ledger = Ledger(tmp_path / "files.db")
    ids = [f"images/class {row // 50:03d}/photograph_{row:06d}.jpg" for row in range(5000)]
    ledger.compare(ImageFile(id_, id_, 100_000 + row, OLD * 10**9 + row, {"label": id_[7:16]}) for row, id_ in enumerate(ids))
    works = list(ledger.work())
    vectors = np.random.default_rng(0).normal(size=(5000, 128)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for start in range(0, 5000, 500):
        some = works[start : start + 500]
        points.write([work.id for work in some], vectors[start : start + 500], {"label": [work.columns["label"] for work in some]})
        ledger.record([(work, b"12345678", None, work.mtime) for work in some])
    points.finish()
    ledger.compact()
    ledger.close()
    raw = vectors.nbytes // (2 if "16" in store else 1) + sum(len(id_) + 9 for id_ in ids)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert size <= 1.3 * raw, size / raw


def test_calibration_marks_known_hits(index: Index, images: Path) -> None:
    version = index.version
    result = calibrate_index(index, fpr=0.05)
    assert index.version != version and index.thresholds is not None
    found = content(index)
    names = sorted({columns["label"] for _, columns in found.values()})
    points = torch.from_numpy(np.stack([np.frombuffer(vector, np.float32) for vector, _ in found.values()]))
    labels = torch.tensor([names.index(columns["label"]) for _, columns in found.values()])
    assert result["threshold"] == PairScores(Space(points, labels)).threshold(0.05) == index.thresholds["threshold"]
    assert result["threshold_interval"][0] < result["threshold_interval"][1]
    hits = index.search(next(images.rglob("*.png")), k=144)
    assert [hit.known for hit in hits] == [hit.score > result["threshold"] for hit in hits] and hits[0].known and not hits[-1].known


def test_threshold_of_a_run_is_copied(run: Path, images: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(run, tmp_path / "run"))
    (model / "calibration.json").write_text(json.dumps({"fpr": 0.01, "threshold": 0.5, "score": "cosine", "other": 3}))
    index = Index.create(model, images, tmp_path / "my.index", workers=0)
    assert index.thresholds == {"fpr": 0.01, "threshold": 0.5, "score": "cosine"}


def test_search_prints_addresses_unchanged() -> None:
    hits = [Hit("0.png", "s3://bucket/0.png", 1.0), Hit("1.png", os.path.abspath("images/1.png"), 0.5)]
    assert _describe_hits("q.png", hits, as_json=False, limit=None) == ["q.png", "  1.0000  s3://bucket/0.png", "  0.5000  images/1.png"]


def test_commands_index_search_evaluate_calibrate(run: Path, images: Path, tmp_path: Path) -> None:
    def invoke(*words: Any) -> str:
        shown = CliRunner().invoke(app, [str(word) for word in words])
        assert shown.exit_code == 0, (shown.output, shown.exception)
        return shown.output

    out, query = tmp_path / "my photos.index", sorted(images.rglob("*.png"))[0]
    text = invoke("index", run, images, "--out", out, "--labels", "--workers", 0)
    assert "144 images (144 added, 0 changed, 0 deleted)" in text and "peak memory" in text
    assert shlex.split(text.partition("search it with: ")[2]) == ["unimetric", "search", str(out), "IMAGE"]
    assert "(0 added, 0 changed, 0 deleted)" in invoke("index", run, images, "--out", out, "--workers", 0)
    assert "threshold" in invoke("calibrate", out, "--fpr", "0.05")
    found = json.loads(invoke("search", out, query, "-k", 2, "--where", "label = 'class 00'", "--json"))
    assert found["query"] == str(query) and found["hits"][0] == {
        "path": str(query),
        "score": pytest.approx(1, abs=1e-5),
        "known": True,
        "columns": {"label": "class 00"},
    }
    assert "known" in invoke("search", out, query, query)
    lines = invoke("evaluate", out, "--metrics", "recall(k=1); map_at_r", "--out", tmp_path / "numbers.json").splitlines()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert lines[0].split() == ["exact", "flat"] and lines[1].split()[0] == "recall(k=1)"
    assert numbers["exact"]["recall(k=1)"] == pytest.approx(numbers["store"]["recall(k=1)"], abs=0.01)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["search", "INDEX", "QUERY", "--where", "nothing = 3"], "unknown column `nothing`"),
        (["search", "INDEX", "none.jpg"], "there is no such image"),
        (["search", "RUN", "QUERY"], "not an index"),
        (["index", "RUN", "IMAGES", "--out", "INDEX", "--store", "flut"], "no `flut`|was built with"),
        (["index", "nothing", "IMAGES", "--out", "INDEX"], "not a run folder or backbone"),
        (["evaluate", "INDEX", "--rerank"], "requires a run folder"),
        (["calibrate", "INDEX", "--out", "x.json"], "requires a run folder"),
    ],
)
def test_commands_report_mistakes_in_a_sentence(run: Path, index: Index, images: Path, words: list[str], problem: str) -> None:
    names = {"INDEX": str(index.path), "RUN": str(run), "IMAGES": str(images), "QUERY": str(next(images.rglob("*.png")))}
    before = Facts.read(index.path)
    shown = CliRunner().invoke(app, [names.get(word, word) for word in words])
    assert isinstance(shown.exception, UnimetricError) and shown.exception.hint
    assert any(each in shown.exception.message for each in problem.split("|")), shown.exception
    assert Facts.read(index.path) == before


@pytest.mark.parametrize(
    "words", ["search INDEX QUERY", "evaluate INDEX", "calibrate INDEX", "audit INDEX --out PAGE", "watch INDEX IMAGES"]
)
def test_commands_reject_an_incomplete_build(index: Index, images: Path, tmp_path: Path, words: str) -> None:
    path = index.path
    replace(Facts.read(path), state="building").write(path)
    names = {"INDEX": path, "QUERY": next(images.rglob("*.png")), "IMAGES": images, "PAGE": tmp_path / "audit.html"}
    shown = CliRunner().invoke(app, [str(names.get(word, word)) for word in words.split()])
    assert isinstance(shown.exception, UnimetricError) and "its build is not complete" in shown.exception.message
    assert not (path / "thresholds.json").exists() and not (tmp_path / "audit.html").exists()


# --- exported files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnx_files(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run as an ONNX file of each precision. It is converted once, because that is slow."""
    pytest.importorskip("onnxruntime", reason="pip install 'unimetric[onnx]'")
    from unimetric.formats import onnx

    folder, graphs, convert = tmp_path_factory.mktemp("onnx"), [], onnx._convert

    def convert_once(model: Any) -> Any:
        graphs.append(graphs[0] if graphs else convert(model))
        return copy.deepcopy(graphs[0])

    (run / FILE).write_text(json.dumps({"fpr": 0.01, "threshold": 0.5, "score": "cosine"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "_convert", convert_once)
        for each in ("fp32", "fp16", "int8"):
            export_as(run, folder / f"{each}.onnx", to=f"onnx(precision='{each}')", images=0, note=lambda text: None)
    (run / FILE).unlink()
    return {each: folder / f"{each}.onnx" for each in ("fp32", "fp16", "int8")}


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-5), ("fp16", 0.01), ("int8", 0.1)])
def test_index_of_an_onnx_file_finds_what_the_run_finds(
    onnx_files: dict[str, Path], run: Path, index: Index, images: Path, tmp_path: Path, precision: str, near: float
) -> None:
    wide, path = tmp_path / "wide.png", tmp_path / "onnx.index"
    Index.create(onnx_files[precision], images, path, labels=True, workers=0).close()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (45, 131, 3), dtype=np.uint8)).save(wide)
    with Index.open(path) as other:
        assert other.facts.runtime == "onnx" and not (path / "model").exists() and index.facts.runtime == "torch"
        assert other.thresholds is not None and other.thresholds["threshold"] == 0.5
        for query in [*sorted(images.rglob("*.png"))[::16], wide]:
            mine, found = ({hit.id: hit.score for hit in each.search(query, 200)} for each in (index, other))
            assert mine.keys() == found.keys() and np.allclose(list(mine.values()), [found[id_] for id_ in mine], atol=near)
        (images / "new.png").write_bytes(wide.read_bytes())
        assert other.update(images, workers=0)["added"] == 1
        assert other.search(wide, 1)[0].id == "new.png"
    with pytest.raises(UnimetricError, match="another model"):
        Index.create(run, images, path, workers=0)


def test_foreign_and_changed_onnx_files_are_rejected(onnx_files: dict[str, Path], images: Path, tmp_path: Path) -> None:
    import onnx

    graph = onnx.load(onnx_files["fp32"])
    (tmp_path / "text.onnx").write_bytes(b"no graph")
    notes = json.loads(graph.metadata_props[0].value)
    for name, stored in {"foreign": {}, "wrong": {"unimetric": json.dumps(notes | {"dim": 5})}}.items():
        onnx.helper.set_model_props(graph, stored)
        onnx.save(graph, tmp_path / f"{name}.onnx")
    words = {"text": "unreadable", "foreign": "not exported by Unimetric", "wrong": r"output must be \(1, 5\)", "none": "no such"}
    for name, problem in words.items():
        with pytest.raises(UnimetricError, match=rf"{name}\.onnx: .*{problem}"):
            Index.create(tmp_path / f"{name}.onnx", images, tmp_path / name, workers=0)
        assert not (tmp_path / name).exists()
    with pytest.raises(UnimetricError, match="contains its `transform`"):
        Index.create(onnx_files["fp32"], images, tmp_path / "other", workers=0, transform="glyphs(size=16)")
    path = tmp_path / "my.index"
    Index.create(onnx_files["fp32"], images, path, workers=0).close()
    (path / "model.onnx").write_bytes(onnx_files["fp16"].read_bytes())
    with Index.open(path) as opened, pytest.raises(UnimetricError, match=r"model\.onnx: is not the model"):
        opened.search(next(images.rglob("*.png")))
