"""Boxes of csv files: several images per file, cropped before everything else."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from unimetric import Index
from unimetric.analysis.evaluate import evaluate
from unimetric.cli import app
from unimetric.config import load
from unimetric.deploy.gallery import Gallery
from unimetric.errors import UnimetricError
from unimetric.images.pack import Pack, decode, make_thumbnail
from unimetric.images.packing import write
from unimetric.images.regions import split_box
from unimetric.spec import create
from unimetric.training.loop import train

COLORS = ((230, 20, 20), (20, 200, 40), (30, 60, 220), (220, 210, 30))
#: Left, top, width and height of the quarters of an image of 40 x 24 pixels.
QUARTERS = ((0, 0, 20, 12), (20, 0, 20, 12), (0, 12, 20, 12), (20, 12, 20, 12))


@pytest.fixture(scope="module")
def quarters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images whose quarters have the colors of four classes, and a csv file with one line per quarter."""
    folder = tmp_path_factory.mktemp("quarters")
    rng = np.random.default_rng(0)
    lines = ["path,label,x,y,width,height"]
    for number in range(4):
        image = np.zeros((24, 40, 3), np.uint8)
        for label, (left, top, width, height) in enumerate(QUARTERS):
            image[top : top + height, left : left + width] = np.clip(rng.normal(0, 9, (height, width, 3)) + COLORS[label], 0, 255)
            lines.append(f"photos/{number}.png,class {label},{left},{top},{width},{height}")
        (folder / "photos").mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"photos/{number}.png")
    (folder / "boxes.csv").write_text("\n".join(lines))
    return folder


def read(folder: Path, text: str, extra: str = ""):
    (folder / "other.csv").write_text(text)
    return create("datasets", f"csv(file='{folder / 'other.csv'}', on_single='skip'{extra})")


def test_several_boxes_of_one_file_are_several_images(quarters):
    table = create("datasets", f"csv(file='{quarters / 'boxes.csv'}')")
    assert len(table) == 16 and len(set(table.paths)) == 16
    assert table.paths[5] == f"{quarters}/photos/1.png#xywh=20,0,20,12" and split_box(table.paths[5])[1] == QUARTERS[1]
    for row, path in enumerate(table.paths):
        image = decode(path)
        assert image.shape == (12, 20, 3)
        assert np.abs(image.mean((0, 1)) - COLORS[table.labels[row]]).max() < 6
    assert np.array_equal(decode(table.paths[3]), decode(f"{quarters}/photos/0.png")[12:, 20:])


@pytest.mark.parametrize(
    ("header", "cells"),
    [
        ("x,y,width,height", ["3,2,10,5", "0,0,40,24", ",,,", "nan,nan,nan,nan"]),
        ("x_1,x_2,y_1,y_2", ["3,13,2,7", "0,40,0,24", ",,,", "nan,,nan,None"]),  # left, right, top, bottom
        ("bbox", ['"[2.6, 1.7, 10.0, 5.2]"', '"(0, 0, 40, 24)"', '""', "[]"]),
        ("height,bbox", ['99,"3 2 10 5"', '99,"0,0,40,24"', "99,", "99,nan"]),  # `height` alone does not define a box
    ],
)
def test_columns_of_boxes(quarters, header, cells):
    lines = [f"photos/{number}.png,a,{cell}" for number, cell in enumerate(cells)]
    table = read(quarters, "\n".join([f"path,label,{header}", *lines]))
    assert [split_box(path)[1] for path in table.paths] == [(3, 2, 10, 5), (0, 0, 40, 24), None, None]
    assert decode(table.paths[0]).shape == (5, 10, 3) and decode(table.paths[2]).shape == (24, 40, 3)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("0,0,5", "the box must be four numbers"),
        ("0,0,5,x", "the box must be four numbers, got `0,0,5,x`"),
        ("0,0,5,inf", "the box must be four numbers"),
        ("0,0,,5", "the box must be four numbers"),
        ("4,4,0,5", "at least 1 pixel wide and high, got `4,4,0,5`"),
        ("4,4,-3,5", "at least 1 pixel wide and high"),
        ("30,4,11,5", r"inside `1.png` of 40 x 24 pixels, got x=30, y=4, width=11, height=5"),
        ("-1,0,10,5", "inside `1.png` of 40 x 24 pixels, got x=-1"),
    ],
)
def test_bad_boxes_name_file_and_line(quarters, cells, message):
    with pytest.raises(UnimetricError, match=rf"other.csv`, line 3: .*{message}") as caught:
        read(quarters, f"path,label,x,y,width,height\nphotos/0.png,a,0,0,5,5\nphotos/1.png,a,{cells}\n")
    assert caught.value.hint


def test_the_same_box_twice_is_an_error(quarters):
    text = "path,label,bbox\nphotos/0.png,a,0 0 5 5\nphotos/0.png,a,0 0 5 6\nphotos/0.png,a,\nphotos/0.png,a,0 0 5 5\n"
    with pytest.raises(UnimetricError, match=r"line 5: .*0.png#xywh=0,0,5,5` is listed in line 2 already"):
        read(quarters, text)
    assert len(read(quarters, text.rsplit("photos", 1)[0])) == 3


def test_clip_and_ignore(quarters):
    text = "path,label,bbox\nphotos/0.png,a,-3 20 10 9\nphotos/1.png,a,38 0 9 9\n"
    assert [split_box(path)[1] for path in read(quarters, text, ", boxes='clip'").paths] == [(0, 20, 7, 4), (38, 0, 2, 9)]
    assert read(quarters, text, ", boxes='ignore'").paths == (f"{quarters}/photos/0.png", f"{quarters}/photos/1.png")
    with pytest.raises(UnimetricError, match="line 2: the box must be inside"):
        read(quarters, text.replace("-3 20", "-10 20"), ", boxes='clip'")


def test_a_file_that_changed_after_it_was_listed(quarters, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    with pytest.raises(UnimetricError, match=r"small.png#xywh=0,0,9,8: the box must be inside the image of 8 x 8 pixels"):
        decode(f"{tmp_path}/small.png#xywh=0,0,9,8")
    with pytest.raises(UnimetricError, match="1 of 2 listed images are missing"):
        read(quarters, "path,label,bbox\nphotos/0.png,a,0 0 5 5\nphotos/lost.png,a,0 0 5 5\n")


def test_wildlife(quarters):
    lines = [f'{number},leo,photos/{number}.png,"[20.0, 12.0, 20.0, 12.0]"' for number in range(2)]
    (quarters / "metadata.csv").write_text("\n".join(["image_id,identity,path,bbox", *lines]))
    table = create("datasets", f"wildlife(root='{quarters}')")
    assert [split_box(path)[1] for path in table.paths] == [QUARTERS[3]] * 2
    assert create("datasets", f"wildlife(root='{quarters}', boxes='ignore')").paths[0] == f"{quarters}/photos/0.png"


def test_pack(quarters, tmp_path):
    table = create("datasets", f"csv(file='{quarters / 'boxes.csv'}')")
    write(tmp_path / "boxes.pack", table, encoding="png", short_side=None)
    pack = Pack.open(tmp_path / "boxes.pack")
    assert pack.names[:2] == ("0.png#xywh=0,0,20,12", "0.png#xywh=20,0,20,12") and len(set(pack.names)) == 16
    for path, packed in zip(table.paths, pack.table.paths, strict=True):
        assert np.array_equal(decode(path), decode(packed))


def test_train_evaluate_and_index(quarters, tmp_path):
    """One run over files and over a pack, and an index whose ids are paths with boxes."""
    config = load(
        dataset=f"csv(file='{quarters / 'boxes.csv'}')",
        transform="glyphs(size=32)",
        backbone="small(channels=16)",
        head="linear(dim=16)",
        batch_size=8,
        epochs=1,
        logger="none",
        device="cpu",
        workers=0,
    )
    train(config, tmp_path / "run", quiet=True)
    # Colors tell the classes of the quarters apart. Whole files would be four images of all classes.
    numbers = evaluate(tmp_path / "run", metrics=["recall(k=1)"], save=tmp_path / "test.npz")
    assert numbers["recall(k=1)"] == 1.0
    with np.load(tmp_path / "test.npz") as saved:
        embeddings = dict(zip(saved["paths"].tolist(), saved["embeddings"], strict=True))

    Index.create(tmp_path / "run", quarters / "boxes.csv", tmp_path / "index", workers=0, device="cpu").close()
    with Index.open(tmp_path / "index", device="cpu") as index:
        assert len(index) == 16
        id_ = "photos/2.png#xywh=20,12,20,12"
        whole = embeddings[f"{quarters}/{id_}"]
        np.testing.assert_allclose(index.embed([index.image_path(id_)])[0], whole, rtol=1e-4, atol=1e-5)
        hits = index.search(index.image_path(id_), k=4)
        assert {hit.id for hit in hits} == {f"photos/{number}.png#xywh=20,12,20,12" for number in range(4)}
        assert {hit.columns["label"] for hit in hits} == {"class 3"}
        data, _ = Gallery(index).read(id_)
        assert np.array_equal(np.array(Image.open(io.BytesIO(data))), decode(index.image_path(id_)))
        assert Image.open(io.BytesIO(make_thumbnail(index.image_path(id_), 64))).size == (20, 12)

    result = CliRunner().invoke(app, ["search", str(tmp_path / "index"), f"{quarters}/{id_}", "-k", "4", "--device", "cpu"])
    assert result.exit_code == 0 and result.output.count("label=class 3") == 4

    # Another box is another image: the old one is deleted, the others are not read again.
    lines = (quarters / "boxes.csv").read_text().replace("photos/0.png,class 0,0,0,20,12", "photos/0.png,class 0,1,1,18,10")
    (quarters / "moved.csv").write_text(lines)
    with Index.open(tmp_path / "index", device="cpu") as index:
        assert index.update(quarters / "moved.csv", workers=0) == {"added": 1, "changed": 0, "deleted": 1, "unreadable": 0}
    (quarters / "moved.csv").write_text(lines.replace("1,1,18,10", "1,1,-1,10"))
    result = CliRunner().invoke(app, ["index", str(tmp_path / "run"), str(quarters / "moved.csv"), "--out", str(tmp_path / "bad")])
    assert "moved.csv`, line 2: the box must be at least 1 pixel" in str(result.exception)
