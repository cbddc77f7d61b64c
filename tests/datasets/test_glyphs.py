"""The embedded dataset: the same bytes every time, look-alikes once, and enough of everything to learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unimetric.datasets.glyphs import glyphs, instances, look_alikes
from unimetric.errors import UnimetricError
from unimetric.images.pack import Pack
from unimetric.images.packing import write
from unimetric.images.table import Table
from unimetric.spec import create

BLOCKS = ("latin", "greek", "cyrillic", "armenian", "georgian", "arrows", "operators", "shapes")


@pytest.fixture(scope="module")
def table() -> Table:
    """All drawings, from the cache that the tests share."""
    return glyphs()


@pytest.fixture(scope="module")
def pack(table: Table) -> Pack:
    return Pack.open(table.paths[0].partition("::")[0])


def test_is_large_enough_and_uneven(table: Table, pack: Pack) -> None:
    assert table.source_names == BLOCKS
    counts = np.bincount(table.labels)
    assert len(counts) == len(table.class_names) > 1200
    assert counts.min() >= 8 and counts.max() >= 20
    assert len(table) > 15_000 and (pack.sizes == 32).all()
    block_of = {}
    for label, source in zip(table.labels, table.source, strict=True):
        assert block_of.setdefault(label, source) == source
    assert np.bincount(list(block_of.values())).min() > 60


def test_half_of_each_blocks_classes_are_for_training(table: Table) -> None:
    assert not set(table.labels[table.train]) & set(table.labels[~table.train])
    for source in range(8):
        here = table.source == source
        train, rest = len(set(table.labels[here & table.train])), len(set(table.labels[here & ~table.train]))
        assert train - rest in (0, 1)


def test_look_alikes_are_one_class(table: Table) -> None:
    codes = {int(name.split()[0][2:], 16) for name in table.class_names}
    for first, *others in [
        (0x41, 0x391, 0x410),  # A, Alpha, A of Cyrillic
        (0x42, 0x392, 0x412),
        (0x48, 0x397, 0x41D),
        (0x54, 0x3A4, 0x422),
        (0x6F, 0x3BF, 0x43E, 0x585),  # o in four scripts
        (0x69, 0x456),
        (0x3B, 0x37E),  # semicolon, Greek question mark
        (0xB5, 0x3BC),  # micro, mu
        (0xD0, 0x110, 0x189),  # eth, D with stroke, African D: within a block, too
        (0x1A9, 0x3A3),  # esh, Sigma
        (0x393, 0x413),  # Gamma, Ghe
        (0x3A0, 0x41F),
    ]:
        assert first in codes
        assert not codes & set(others)
    # What differs in shape, size or place stays apart, be it little: 0 O, l I, full stop and middle dot, accents, Esh and sum, ...
    apart = "0O1lI.,·'áàâäãåÅÄǞЖжΩωШЩԱԲაბႠ←↑↔⇐∑∏+±∓≤≥⊂⊃∈∋■□▲△●○"
    assert codes >= {ord(character) for character in apart}
    assert not codes & {0x20, 0xA0}


def test_pictures_have_ink_on_white_paper_and_fit(pack: Pack) -> None:
    pixels = pack.decoded()[0].reshape(-1, 32, 32, 3)
    assert (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all()
    grey = pixels[..., 0]
    assert (grey.min((1, 2)) < 200).all()
    frame = np.ones((32, 32), bool)
    frame[1:-1, 1:-1] = False
    assert (grey[:, frame] == 255).mean() > 0.99


def test_no_two_pictures_are_the_same(pack: Pack) -> None:
    pictures = pack.decoded()[0].reshape(len(pack), -1)
    assert len({picture.tobytes() for picture in pictures}) == len(pack)


def test_broken_cache_is_drawn_anew_with_the_same_bytes(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(pack.path)
    whole = file.read_bytes()
    copy = tmp_path / file.name
    copy.write_bytes(whole[: len(whole) // 2])
    monkeypatch.setenv("UNIMETRIC_CACHE", str(tmp_path))
    again = glyphs()
    # The cache may contain a pack of an earlier version, so write its images and table in the current format.
    write(tmp_path / "whole.pack", pack.table, short_side=None, encoding="raw")
    assert copy.read_bytes() == (tmp_path / "whole.pack").read_bytes()
    assert again.paths[0] == f"{copy}::0"


def test_some_blocks(table: Table) -> None:
    some = create("datasets", "glyphs(blocks=['shapes', 'greek'])")
    assert some.source_names == ("greek", "shapes")
    rows = np.flatnonzero(np.isin(table.source, [1, 7]))
    assert some.paths == tuple(table.paths[row] for row in rows)
    assert [some.class_names[label] for label in some.labels] == [table.class_names[table.labels[row]] for row in rows]
    assert [some.source_names[source] for source in some.source] == [table.source_names[table.source[row]] for row in rows]
    np.testing.assert_array_equal(some.train, table.train[rows])
    assert len(set(some.labels)) == len(some.class_names)
    assert create("datasets", "glyphs(blocks='arrows')").source_names == ("arrows",)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("glyphs(blocks='greec')", "did you mean `greek`"),
        ("glyphs(blocks=['latin', 3])", "the default is `blocks='all'`"),
        ("glyphs(blocks=[])", "all"),
        ("glyphs(size=500)", "the default is `size=32`"),
        ("glyphs(jitter=-1.0)", "the default is `jitter=1.0`"),
        ("glyphs(sise=32)", "did you mean `size`"),
    ],
)
def test_mistakes(text: str, hint: str) -> None:
    with pytest.raises(UnimetricError) as error:
        create("datasets", text)
    assert hint in error.value.hint


def test_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNIMETRIC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UnimetricError, match=r"file/cache: cannot be created") as error:
        glyphs()
    assert "UNIMETRIC_CACHE" in error.value.hint


def test_shared_drawings_count_once_and_few_are_repeated() -> None:
    one, two = drawing(), drawing((60, 30, 9, 9))
    by_face = {"a": one, "b": two, "c": one.copy()}
    assert instances(by_face, 0.0) == [("a", 0), ("b", 0)]
    assert instances(by_face, 1.0) == [(face, turn) for turn in range(4) for face in "ab"]
    many = {str(number): drawing((60, 30, number, 9)) for number in range(11)}
    assert instances(many, 1.0) == [(face, 0) for face in many]


def drawing(*patches: tuple[int, int, int, int]) -> np.ndarray:
    """A square, and more ink where asked: (top, left, height, width)."""
    ink = np.zeros((96, 96), np.uint8)
    ink[30:60, 30:60] = 255
    for top, left, height, width in patches:
        ink[top : top + height, left : left + width] = 255
    return ink


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ([drawing(), drawing(), drawing()], True),
        ([drawing((60, 30, 1, 30)), drawing((30, 60, 30, 1)), drawing()], True),  # a rim one pixel thin
        ([drawing((60, 30, 2, 2)), drawing((60, 30, 2, 2)), drawing()], False),  # a dot in most faces
        ([drawing((60, 30, 2, 2)), drawing(), drawing()], True),  # a dot in one face of three
        ([np.roll(drawing(), 2, 1)] * 3, False),  # the same shape elsewhere
        ([np.roll(drawing(), 1, 1)] * 3, True),
    ],
)
def test_rule_for_look_alikes(other: list[np.ndarray], alike: bool) -> None:
    faces = ("one", "two", "three")
    square = dict.fromkeys(faces, drawing())
    found = look_alikes({65: square, 913: dict(zip(faces, other, strict=True))})
    assert found == ({913: 65} if alike else {})


def test_look_alikes_are_judged_where_both_are_held_and_only_against_what_is_kept() -> None:
    other = drawing((60, 30, 9, 9))
    assert look_alikes({1: {"one": drawing(), "two": other}, 2: {"two": other, "three": drawing()}}) == {2: 1}
    assert look_alikes({1: {"one": drawing()}, 2: {"two": drawing()}}) == {}
    # A rim at each step: 2 goes for 1, but 3 looks like 2 only, which is gone, and stays.
    steps = {number: {"one": drawing((30, 60, 30, number))} for number in (0, 1, 2)}
    assert look_alikes(steps) == {1: 0}
