"""Splits without leaks, and open sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from unimetric.errors import UnimetricError
from unimetric.geometry.space import Space
from unimetric.images.duplicates import find_duplicates, hash_image
from unimetric.images.table import Table
from unimetric.splits.by_group import by_group
from unimetric.splits.by_similarity import by_similarity
from unimetric.splits.by_time import by_time
from unimetric.splits.open_set import open_set
from unimetric.splits.standard import standard

LABELS = np.arange(60) % 10


def table(**more) -> Table:
    return Table(paths=tuple(map(str, range(60))), labels=LABELS, class_names=tuple("abcdefghij"), train=LABELS < 6, **more)


def test_open_set_has_queries_of_unknown_classes() -> None:
    data = table()
    split = open_set(data, unknown=0.5, validation=0.34, seed=1)
    assert split.train.tolist() == standard(data, validation=0.34, seed=1).train.tolist() and len(split.validation)
    roles = split.assign(data)
    test = roles.take(split.test)
    unknown = np.setdiff1d(test.labels, test.labels[test.gallery])
    assert len(unknown) == 2 and test.query.all()
    assert np.array_equal(roles.query[split.train], data.query[split.train]) and roles.gallery[split.train].all()
    space = Space(np.random.default_rng(0).normal(size=(24, 4)), test.labels, test.query, test.gallery)
    assert len(space.unknown) == 12 == space.unmatched
    assert not np.array_equal(open_set(data, seed=2).gallery, open_set(data, seed=5).gallery)
    held_out = roles.take(split.validation)
    assert len(np.setdiff1d(held_out.labels, held_out.labels[held_out.gallery])) == 1  # the same metrics select the best epoch
    with pytest.raises(UnimetricError, match="needs a known test class"):
        open_set(data, unknown=0.95)
    with pytest.raises(UnimetricError, match="needs a known validation class"):
        open_set(data, unknown=0.76, validation=0.34)


def test_by_group_shares_no_group() -> None:
    group = np.arange(60) // 4 - 1
    data = table(group=group, group_names=tuple(map(str, range(14))))
    plain = standard(data, validation=0.34)
    split = by_group(data, validation=0.34)
    assert split.test.tolist() == plain.test.tolist()
    groups = [set(group[rows]) - {-1} for rows in split.parts.values()]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    dropped = np.setdiff1d(plain.train, split.train)
    held_out = group[np.concatenate([split.validation, split.test])]
    assert len(dropped) and np.isin(group[dropped], held_out).all() and (group[dropped] >= 0).all()
    with pytest.raises(UnimetricError, match="needs groups, got none"):
        by_group(table())
    with pytest.raises(UnimetricError, match="at least 2 train classes"):
        by_group(table(group=np.zeros(60), group_names=("a",)))
    held_out = LABELS[plain.validation]
    first = np.isin(np.arange(60), [np.flatnonzero(label == LABELS)[0] for label in held_out])
    shared = np.where((LABELS >= 6) | (np.isin(LABELS, held_out) & ~first), 0, -1)  # one image of each validation class remains
    with pytest.raises(UnimetricError, match="a validation class must have at least 2 images"):
        by_group(table(group=shared, group_names=("a",)), validation=0.34)


def test_by_time_asks_later_than_it_answers() -> None:
    names = tuple(f"2020-01-{day:02}" for day in range(1, 13))
    day = np.arange(60) // 5
    data = table(group=day, group_names=names)
    split = by_time(data, until="2020-01-06")
    roles = split.assign(data)
    assert day[split.train].max() == 5 and set(LABELS[split.train]) == set(range(6))
    assert day[roles.query & ~data.train].min() > 5 and day[roles.gallery & ~data.train].max() == 5
    assert roles.query[data.train].all()
    half = by_time(data)
    assert 0.3 < half.gallery[half.test].mean() <= 0.5
    assert by_time(replace(data, group_names=tuple(map(str, range(2000, 2012))))).gallery.tolist() == half.gallery.tolist()
    hours = tuple(f"2020-01-{day:02}T{hour:02}:30:00+05:00" for day in range(1, 7) for hour in (0, 23))
    timed = replace(data, group=np.arange(60) % 12, group_names=hours)
    for split in (by_time(timed, until="2020-01-03"), by_time(timed, fraction=0.6)):  # no day is on both sides
        early, late = (np.unique(timed.group[role & ~data.train]) for role in (split.gallery, split.query))
        assert early.tolist() == list(range(6)) and late.tolist() == list(range(6, 12))
    with pytest.raises(UnimetricError, match="got `soon`"):
        by_time(replace(data, group_names=("soon", *names[1:])))
    with pytest.raises(UnimetricError, match="60 of 60 have none"):
        by_time(table())
    with pytest.raises(UnimetricError, match="before and after 2021"):
        by_time(data, until="2021-01-01")


def test_by_time_requires_a_class_on_both_sides() -> None:
    names = tuple(f"2020-01-{day:02}" for day in range(1, 13))
    day = np.where(LABELS < 6, np.arange(60) // 10, np.where(LABELS < 8, 2, 8))
    with pytest.raises(UnimetricError, match="a gallery image up to 2020-01-03 and a query after it, got none") as caught:
        by_time(table(group=day, group_names=names))
    assert "several dates" in caught.value.hint
    day[6] = 0
    with pytest.raises(UnimetricError, match="got none") as caught:
        by_time(table(group=day, group_names=names), until="2020-01-05")
    assert caught.value.hint == "use another date: `until='2020-01-01'`"
    by_time(table(group=day, group_names=names), until="2020-01-01")


def test_by_similarity_drops_copies(tmp_path) -> None:
    rng = np.random.default_rng(0)
    scenes = [Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((90, 80)) for _ in range(60)]
    for row, image in enumerate(scenes):
        image.save(tmp_path / f"{row}.png")
    scenes[9].resize((60, 50)).save(tmp_path / "0.jpg", quality=60)  # a small copy of a test image
    paths = [str(tmp_path / f"{row}.png") for row in range(60)]
    paths[0] = str(tmp_path / "0.jpg")
    data = replace(table(), paths=tuple(paths))
    plain, split = standard(data), by_similarity(data)
    assert np.setdiff1d(plain.train, split.train).tolist() == [0] and split.test.tolist() == plain.test.tolist()
    (tmp_path / "1.png").write_bytes(b"not an image")  # matches nothing, not even a uniform image; training reports or skips it
    Image.new("RGB", (9, 9)).save(tmp_path / "6.png")
    assert by_similarity(data).train.tolist() == split.train.tolist()
    hashes = np.stack([hash_image(np.array(image)) for image in scenes])
    assert find_duplicates(hashes[:5], hashes[3:]).tolist() == [-1, -1, -1, 0, 1]
