"""Packs: what goes in comes out, a broken file is never taken for a whole one, and nothing half-written is left behind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from unimetric.deploy.embedding import to_array
from unimetric.errors import UnimetricError
from unimetric.images.pack import Pack, decode
from unimetric.images.packing import write
from unimetric.images.table import Table

SIZES = [(40, 60), (70, 50), (33, 33), (20, 90), (64, 48), (31, 47)]


def smooth(height: int, width: int, seed: int) -> np.ndarray:
    """A picture as kind to JPEG as photographs are."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def table_of(paths: list[str]) -> Table:
    number = np.arange(len(paths))
    return Table(
        paths=tuple(paths),
        labels=number % 3,
        class_names=("ant", "bée", "cat"),
        train=number % 3 < 2,
        query=number % 2 == 0,
        gallery=number % 2 == 1,
        source=number % 2,
        source_names=("insects", "pets"),
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Table:
    paths = []
    for number, (height, width) in enumerate(SIZES):
        path = tmp_path / "photos" / f"{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth(height, width, number)).save(path)
        paths.append(str(path))
    return table_of(paths)


def test_raw_and_png_come_back_exactly(pictures: Table, tmp_path: Path) -> None:
    for encoding in ("raw", "png"):
        pack = write(tmp_path / "a.pack", pictures, short_side=None, encoding=encoding)
        assert len(pack) == len(SIZES) and pack.sizes.tolist() == [list(size) for size in SIZES]
        for row, (height, width) in enumerate(SIZES):
            np.testing.assert_array_equal(pack.picture(row), smooth(height, width, row))


@pytest.mark.parametrize("encoding", ["jpeg", "webp"])
def test_lossy_encodings_come_back_nearly(pictures: Table, tmp_path: Path, encoding: str) -> None:
    fine = write(tmp_path / "fine.pack", pictures, short_side=None, encoding=encoding, quality=95)
    rough = write(tmp_path / "rough.pack", pictures, short_side=None, encoding=encoding, quality=10)
    for row, (height, width) in enumerate(SIZES):
        original = smooth(height, width, row).astype(int)
        error = np.abs(fine.picture(row) - original).mean()
        assert error < 5
        assert error < np.abs(rough.picture(row) - original).mean()
    assert len(fine.picture_bytes(0)) > len(rough.picture_bytes(0))


def test_table_comes_back_whole_and_says_nothing_of_the_machine(pictures: Table, tmp_path: Path) -> None:
    write(tmp_path / "a.pack", pictures)
    pack = Pack.open(tmp_path / "a.pack")
    for name in ("labels", "train", "query", "gallery", "source"):
        expected = getattr(pictures, name)
        np.testing.assert_array_equal(getattr(pack.table, name), expected)
        assert getattr(pack.table, name).dtype == expected.dtype
    assert pack.table.class_names == pictures.class_names and pack.table.source_names == pictures.source_names
    assert pack.names[:3] == ("0/0.png", "1/1.png", "2/2.png")
    assert pack.table.paths[3] == f"{tmp_path / 'a.pack'}::3"
    assert pack.skipped == ()
    data = (tmp_path / "a.pack").read_bytes()
    length = int.from_bytes(data[-16:-8], "little")
    assert tmp_path.name not in zlib.decompress(data[-48 - length : -48]).decode()


def test_short_side_shrinks_and_never_enlarges(pictures: Table, tmp_path: Path) -> None:
    pack = write(tmp_path / "a.pack", pictures, short_side=32, encoding="raw", interpolation="bicubic")
    assert pack.sizes.tolist() == [[32, 48], [44, 32], [32, 32], [20, 90], [42, 32], [31, 47]]
    expected = Image.fromarray(smooth(40, 60, 0)).resize((48, 32), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(pack.picture(0), np.asarray(expected))


def test_shrinking_is_antialiased(tmp_path: Path) -> None:
    """A fine chequerboard becomes grey; without antialiasing it would become stripes."""
    board = ((np.indices((128, 128)).sum(0) % 2) * 255).astype(np.uint8)
    pack = write(tmp_path / "a.pack", table_of(["board"]), short_side=20, encoding="raw", read=lambda path: board)
    assert pack.picture(0)[2:-2, 2:-2].std() < 6


def test_small_pictures_in_the_wanted_encoding_are_kept_byte_for_byte(tmp_path: Path) -> None:
    small, large = tmp_path / "small.jpg", tmp_path / "large.jpg"
    Image.fromarray(smooth(50, 60, 0)).save(small, quality=70)
    Image.fromarray(smooth(150, 160, 0)).save(large, quality=70)
    pack = write(tmp_path / "a.pack", table_of([str(small), str(large)]), short_side=64)
    assert pack.picture_bytes(0) == small.read_bytes()
    assert pack.picture_bytes(1) != large.read_bytes()
    np.testing.assert_array_equal(pack.picture(0), decode(str(small)))


def test_number_of_workers_changes_no_byte(pictures: Table, tmp_path: Path) -> None:
    one = write(tmp_path / "one.pack", pictures, short_side=24, workers=1)
    many = write(tmp_path / "many.pack", pictures, short_side=24, workers=5)
    assert (tmp_path / "one.pack").read_bytes() == (tmp_path / "many.pack").read_bytes()
    assert one.sha256 == many.sha256


@pytest.mark.parametrize("mode", ["L", "1", "RGBA", "CMYK", "P", "LA", "YCbCr"])
def test_every_mode_is_read_as_the_papers_do(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.tiff" if mode not in ("P", "LA") else tmp_path / "a.png"
    Image.fromarray(smooth(20, 30, 1)).convert(mode).save(path)
    with Image.open(path) as image:
        np.testing.assert_array_equal(decode(str(path)), np.asarray(image.convert("RGB")))


def test_transparent_palette_and_sixteen_bits(tmp_path: Path) -> None:
    palette = Image.fromarray(smooth(20, 30, 1)).quantize(16)
    palette.save(tmp_path / "a.png", transparency=bytes([0] * 8 + [255] * 8))
    np.testing.assert_array_equal(decode(str(tmp_path / "a.png")), np.asarray(palette.convert("RGB")))
    ramp = np.linspace(0, 65535, 600, dtype=np.uint16).reshape(20, 30)
    Image.fromarray(ramp).save(tmp_path / "b.png")
    np.testing.assert_array_equal(decode(str(tmp_path / "b.png"))[:, :, 1], ramp // 256)
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as image:  # a query may be an opened image
            np.testing.assert_array_equal(to_array(image), decode(str(tmp_path / name)))


def test_pixels_of_a_read_only_array_may_be_written() -> None:
    """`np.asarray` of an opened image is read-only, and torch warns about such arrays."""
    pixels = np.broadcast_to(np.uint8(7), (4, 5, 3))
    assert to_array(pixels).flags.writeable and (to_array(pixels) == 7).all()


@pytest.mark.parametrize(("bits", "largest"), [(8, "255"), (10, "1,023"), (12, "4,095")])
def test_fewer_bits_in_sixteen_are_rejected(tmp_path: Path, bits: int, largest: str) -> None:
    ramp = np.linspace(0, 2**bits - 1, 600, dtype=np.uint16).reshape(20, 30)
    for name, pixels in (("a.png", ramp), ("b.tiff", ramp.astype(np.int32))):
        Image.fromarray(pixels).save(tmp_path / name)
        for read in (lambda path: decode(str(path)), lambda path: to_array(Image.open(path))):
            with pytest.raises(UnimetricError, match=f": 16-bit pixels must be up to 65,535, got at most {largest}") as caught:
                read(tmp_path / name)
            assert "convert it to 8 bits" in caught.value.hint
    for name, pixels in (("c.png", 0 * ramp), ("d.png", (65535 // (2**bits - 1)) * ramp)):
        Image.fromarray(pixels).save(tmp_path / name)
        np.testing.assert_array_equal(decode(str(tmp_path / name))[:, :, 0], pixels // 256)
    assert not decode(f"{tmp_path / 'd.png'}#xywh=0,0,1,1").any()  # a dark box in an image of the whole range


def test_fewer_bits_in_sixteen_are_rejected_in_color(tmp_path: Path) -> None:
    def save(name: str, values: np.ndarray) -> str:  # Pillow writes no such file
        height, width, _ = values.shape
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0), b"IDAT": zlib.compress(rows), b"IEND": b""}
        chunks = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts.items()]
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
        return str(tmp_path / name)

    ramp = np.linspace(0, 4095, 1800, dtype=np.uint16).reshape(20, 30, 3)
    with pytest.raises(UnimetricError, match=r"16-bit pixels must be up to 65,535, got at most 4,095"):
        decode(save("a.png", ramp))
    full = save("b.png", 16 * ramp)
    np.testing.assert_array_equal(decode(full), ramp // 16)
    assert decode(f"{full}#xywh=0,0,1,1").max() < 16  # a dark box in an image of the whole range
    Image.fromarray(np.full((4, 5, 3), 9, np.uint8)).save(tmp_path / "c.png")
    assert (decode(str(tmp_path / "c.png")) == 9).all()


def test_floating_point_pixels_are_rejected(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)).save(tmp_path / "a.tiff")
    with pytest.raises(UnimetricError, match=r"a\.tiff: pixels must be integers, got floating-point numbers") as caught:
        decode(str(tmp_path / "a.tiff"))
    assert "convert it to 8 bits" in caught.value.hint


def save_turned(file: Path, pixels: np.ndarray, orientation: int) -> None:
    """Store an image as a camera in another position does."""
    undo = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, 1)
    image, exif = Image.fromarray(pixels), Image.Exif()
    image.getexif()[0x0112] = undo
    exif[0x0112] = orientation
    ImageOps.exif_transpose(image).save(file, exif=exif, **({"lossless": True} if file.suffix == ".webp" else {}))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("ending", [".png", ".webp", ".tiff"])
def test_images_are_turned_by_their_exif_orientation(tmp_path: Path, ending: str, orientation: int) -> None:
    upright = smooth(20, 30, 1)
    save_turned(tmp_path / f"a{ending}", upright, orientation)
    np.testing.assert_array_equal(decode(str(tmp_path / f"a{ending}")), upright)


def test_turned_images_of_other_kinds_and_boxes(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 600, dtype=np.uint16).reshape(20, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(ramp).save(tmp_path / "gray.png", exif=exif)
    np.testing.assert_array_equal(decode(str(tmp_path / "gray.png"))[:, :, 0], np.rot90(ramp // 256, -1))
    save_turned(tmp_path / "a.png", smooth(20, 30, 1), 6)
    stored = np.asarray(Image.open(tmp_path / "a.png"))
    np.testing.assert_array_equal(decode(f"{tmp_path / 'a.png'}#xywh=2,3,10,12"), np.rot90(stored[3:15, 2:12], -1))
    save_turned(tmp_path / "a.tiff", smooth(20, 30, 1), 6)  # Pillow turns it before it is cropped
    np.testing.assert_array_equal(decode(f"{tmp_path / 'a.tiff'}#xywh=2,3,10,12"), smooth(20, 30, 1)[3:15, 2:12])
    Image.fromarray(smooth(20, 30, 1)).save(tmp_path / "damaged.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode(str(tmp_path / "damaged.jpg")).shape == (20, 30, 3)


def test_packs_store_images_upright(tmp_path: Path) -> None:
    save_turned(tmp_path / "a.jpg", smooth(40, 60, 1), 6)
    table = table_of([str(tmp_path / "a.jpg")] * 2)
    for encoding in ("raw", "jpeg", "png"):
        pack = write(tmp_path / f"{encoding}.pack", table, encoding=encoding)
        assert pack.sizes[0].tolist() == [40, 60]
        assert np.abs(pack.picture(0).astype(int) - decode(table.paths[0])).mean() < (3 if encoding == "jpeg" else 1e-9)
        assert Image.open(io.BytesIO(pack.picture_bytes(0))).getexif().get(0x0112, 1) == 1 if encoding != "raw" else True


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_decoded_is_every_picture_one_after_the_other(pictures: Table, tmp_path: Path, encoding: str) -> None:
    pack = write(tmp_path / "a.pack", pictures, short_side=32, encoding=encoding)
    seen: list[tuple[int, int]] = []
    for rows in (None, np.array([2, 3]), np.array([4, 0, 4, 2]), np.array([], np.int64)):
        pixels, offsets, sizes = pack.decoded(rows, workers=3, progress=lambda done, total: seen.append((done, total)))
        chosen = range(len(pack)) if rows is None else rows
        assert pixels.dtype == np.uint8 and offsets.dtype == np.int64 and sizes.shape == (len(chosen), 2)
        assert len(pixels) == 3 * sizes.prod(1).sum()
        for row, offset, (height, width) in zip(chosen, offsets, sizes, strict=True):
            np.testing.assert_array_equal(pixels[offset : offset + height * width * 3].reshape(height, width, 3), pack.picture(row))
    assert seen[-1] == (4, 4)


def test_decoded_raw_pack_is_the_file_itself(pictures: Table, tmp_path: Path) -> None:
    pack = write(tmp_path / "a.pack", pictures, encoding="raw")
    for rows in (None, np.array([1, 2, 3])):
        pixels = pack.decoded(rows)[0]
        assert isinstance(pixels, np.memmap) and not pixels.flags.writeable
    assert pack.picture(0).flags.writeable  # but a single picture is the caller's own


def test_many_pictures_keep_their_order(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (300, 3), dtype=np.uint8)
    table = table_of([f"{number}" for number in range(300)])
    pack = write(
        tmp_path / "a.pack", table, encoding="png", workers=4, read=lambda path: np.broadcast_to(colours[int(path)], (2, 3, 3)).copy()
    )
    pixels, offsets, _ = pack.decoded(workers=4)
    np.testing.assert_array_equal(pixels[offsets[:, None] + np.arange(3)], colours)


def test_locators_other_processes_and_packs_of_packs(pictures: Table, tmp_path: Path) -> None:
    pack = write(tmp_path / "a.pack", pictures, short_side=None, encoding="raw")
    np.testing.assert_array_equal(decode(pack.table.paths[2]), smooth(33, 33, 2))
    assert len(pickle.dumps(pack)) < 1000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(pack)).picture(2), smooth(33, 33, 2))
    again = write(tmp_path / "b.pack", pack.table, short_side=None, encoding="png")
    np.testing.assert_array_equal(again.picture(2), smooth(33, 33, 2))
    assert again.names == pack.names
    for locator in (f"{tmp_path}/a.pack::6", f"{tmp_path}/none.pack::0"):
        with pytest.raises(UnimetricError, match=r"a\.pack::6|none\.pack"):
            decode(locator)


def test_pack_can_replace_itself(pictures: Table, tmp_path: Path) -> None:
    pack = write(tmp_path / "a.pack", pictures, short_side=None, encoding="png")
    smaller = write(tmp_path / "a.pack", pack.table, short_side=16, encoding="raw")
    assert smaller.sizes.min(1).max() == 16 and len(smaller) == len(pack)
    assert decode(smaller.table.paths[0]).shape == (16, 24, 3)


# --- bad pictures ---------------------------------------------------------------------------------------------------


def png(width: int, height: int, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def bad(folder: Path, kind: str) -> Path:
    path = folder / "bad.jpg"
    if kind == "truncated":
        data = io.BytesIO()
        Image.fromarray(smooth(64, 64, 0)).save(data, "JPEG")
        path.write_bytes(data.getvalue()[: len(data.getvalue()) // 2])
    elif kind == "text":
        path.write_text("these are not the pixels you are looking for")
    elif kind == "postscript":
        path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    elif kind == "empty":
        path.touch()
    elif kind == "bomb":
        path.write_bytes(png(20_000, 20_000, zlib.compress(b"\0" * 1_000_000)))
    elif kind == "chunk":
        path.write_bytes(png(20, 20, b"\xff" * 40))
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    return path


BAD = {
    "truncated": "cannot be decoded",
    "text": "is not an image",
    "postscript": "is not an image",
    "empty": "is empty",
    "bomb": "178 megapixels",
    "chunk": "cannot be decoded",
    "missing": "no such image",
    "folder": "is not a file",
    "pipe": "is not a file",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_picture_is_named_or_skipped(pictures: Table, tmp_path: Path, kind: str) -> None:
    path = bad(tmp_path, kind)
    with pytest.raises(UnimetricError, match=BAD[kind]) as error:
        decode(str(path))
    assert str(path) in error.value.message and 'on_bad_picture = "skip"' in error.value.hint
    table = table_of([*pictures.paths[:2], str(path), *pictures.paths[2:]])
    with pytest.raises(UnimetricError, match=BAD[kind]) as error:
        write(tmp_path / "out" / "a.pack", table)
    assert str(path) in error.value.message
    assert os.listdir(tmp_path / "out") == []
    write(tmp_path / "out" / "a.pack", table, short_side=None, encoding="raw", on_bad_picture="skip")
    pack = Pack.open(tmp_path / "out" / "a.pack")
    assert [name for name, _ in pack.skipped] == ["bad.jpg"] and BAD[kind] in pack.skipped[0][1]
    kept = np.array([0, 1, 3, 4, 5, 6])
    np.testing.assert_array_equal(pack.table.labels, table.labels[kept])
    np.testing.assert_array_equal(pack.picture(2), smooth(33, 33, 2))


def test_bomb_stays_one_when_pillow_is_told_to_look_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(UnimetricError, match="decompression bomb"):
        decode(str(bad(tmp_path, "bomb")))


def test_large_image_gives_no_warning_of_pillow(tmp_path: Path) -> None:
    Image.new("1", (9500, 9500)).save(tmp_path / "large.png")
    code = f"from unimetric.images.decode import image_size; print(image_size({str(tmp_path / 'large.png')!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "(9500, 9500)\n" and done.stderr == ""


def test_nothing_but_bad_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnimetricError, match="none of the 1 images"):
        write(tmp_path / "a.pack", table_of([str(bad(tmp_path, "text"))]), on_bad_picture="skip")
    assert not (tmp_path / "a.pack").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoding": "jpg"}, "jpeg"),
        ({"interpolation": "bilinar"}, "bilinear"),
        ({"on_bad_picture": "skp"}, "skip"),
        ({"short_side": 0}, "short_side"),
        ({"quality": 101}, "quality"),
        ({"workers": 0}, "workers"),
    ],
)
def test_bad_options_stop_before_anything_is_read(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(UnimetricError) as error:
        write(tmp_path / "a.pack", table_of(["nowhere.jpg"]), **arguments)
    assert message in str(error.value) and "nowhere" not in str(error.value)


def test_names_that_cannot_be(pictures: Table, tmp_path: Path) -> None:
    (tmp_path / "folder.pack").mkdir()
    (tmp_path / "file").touch()
    for name in ("a.bin", "folder.pack", "file/a.pack", "x" * 300 + ".pack"):
        with pytest.raises(UnimetricError) as error:
            write(tmp_path / name, pictures)
        assert name in error.value.message and error.value.hint
    with pytest.raises(UnimetricError, match="at least 1 image"):
        write(tmp_path / "a.pack", pictures.take(np.array([], np.int64)))


# --- nothing half-written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_pack_leaves_the_old_one(
    pictures: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool, fault: type[BaseException]
) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    folder = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise fault

    with pytest.raises(fault):
        write(folder / "a.pack", pictures, progress=stop)
    assert os.listdir(folder) == []
    old = write(folder / "a.pack", pictures, short_side=8).sha256
    with pytest.raises(fault):
        write(folder / "a.pack", pictures, progress=stop)
    assert os.listdir(folder) == ["a.pack"] and Pack.open(folder / "a.pack").sha256 == old
    mask = os.umask(0)
    os.umask(mask)
    assert (folder / "a.pack").stat().st_mode & 0o777 == 0o666 & ~mask


SCRIPT = """
import os, resource, signal, sys
import numpy as np
from unimetric.errors import UnimetricError
from unimetric.images.packing import write
from unimetric.images.table import Table

path, what = sys.argv[1:]
if what == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

def progress(done, total):
    if what == "kill" and done == 25:
        os.kill(os.getpid(), signal.SIGKILL)

# Enough to outgrow every buffer on the way.
table = Table(paths=tuple(map(str, range(50))), labels=np.zeros(50), class_names=("a",), train=np.ones(50))
try:
    write(path, table, short_side=None, encoding="raw", progress=progress, read=lambda name: np.full((400, 1000, 3), int(name), np.uint8))
except UnimetricError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("what", ["limit", "disk", "kill"])
def test_full_disk_and_killed_process_leave_nothing(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(folder / "a.pack"), what]
    if what == "disk":
        if not shutil.which("unshare"):
            pytest.skip("cannot mount a small disk here")
        # A disk of a megabyte that only the child sees; what is left on it is counted before it goes away.
        mount = f'mount -t tmpfs -o size=1m none "{folder}" || exit 77; "$@"; code=$?; ls -A "{folder}" | wc -l; exit $code'
        command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if what == "disk" and done.returncode not in (0, 2):
        pytest.skip("cannot mount a small disk here")
    if what == "kill":
        assert done.returncode == -signal.SIGKILL
        if not has_nameless_files(folder):
            assert not (folder / "a.pack").exists()
            return
    else:
        assert done.returncode == 2, done.stderr
        assert f"{folder / 'a.pack'}: the disk is full; nothing was written" in done.stdout and "hint: " in done.stdout
        assert what == "limit" or done.stdout.split()[-1] == "0"
    assert os.listdir(folder) == []


def has_nameless_files(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        return False
    return True


# --- broken packs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write(tmp_path / "tiny.pack", table_of(["a", "b", "c"]), short_side=None, encoding="raw", read=lambda path: smooth(4, 5, ord(path)))
    return tmp_path / "tiny.pack"


def test_every_altered_byte_is_noticed(tiny: Path) -> None:
    whole = tiny.read_bytes()
    for place in range(len(whole)):
        tiny.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(UnimetricError) as error:
            Pack.open(tiny)
        assert str(tiny) in error.value.message and error.value.hint
    tiny.write_bytes(whole)
    assert len(Pack.open(tiny)) == 3


def test_every_cut_is_noticed(tiny: Path) -> None:
    whole = tiny.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        tiny.write_bytes(whole[:length])
        for verify in (True, False):
            with pytest.raises(UnimetricError, match=r"tiny\.pack"):
                Pack.open(tiny, verify=verify)
    for more in (b"\0", whole):
        tiny.write_bytes(whole + more)
        with pytest.raises(UnimetricError, match=r"tiny\.pack"):
            Pack.open(tiny)


def test_footer_that_contradicts_itself_or_comes_from_the_future(tiny: Path) -> None:
    whole = tiny.read_bytes()
    length = int.from_bytes(whole[-16:-8], "little")
    content = json.loads(zlib.decompress(whole[-48 - length : -48]))

    def rewrite(**changes: object) -> None:
        footer = zlib.compress(json.dumps(content | changes).encode())
        tiny.write_bytes(whole[: -48 - length] + footer + hashlib.sha256(footer).digest() + len(footer).to_bytes(8, "little") + whole[-8:])

    rewrite()
    assert len(Pack.open(tiny)) == 3
    images = hashlib.sha256(whole[8 : -48 - length]).hexdigest()
    rewrite(version=1, sha256=images)
    assert len(Pack.open(tiny)) == 3
    for version in (1, 2):
        rewrite(version=version, sha256=images if version == 2 else content["sha256"])
        with pytest.raises(UnimetricError, match=r"tiny\.pack: its images were modified"):
            Pack.open(tiny)
    for changes in (
        {"offset": [0, 60, 10_000]},
        {"offset": [0, 60, -60]},
        {"length": [60, 60, 61]},
        {"height": [400, 4, 4]},
        {"width": [5, 5]},
        {"labels": [0, 1, 9]},
        {"train": [1, 1]},
        {"encoding": "exe"},
        {"skipped": 3},
        {"names": None},
        {"version": "new"},
    ):
        rewrite(**changes)
        with pytest.raises(UnimetricError, match=r"tiny\.pack: its table cannot be parsed"):
            Pack.open(tiny)
    rewrite(version=3)
    with pytest.raises(UnimetricError, match="newer"):
        Pack.open(tiny)


def test_what_is_no_pack_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.pack").write_text("hello")
    (tmp_path / "b.pack").mkdir()
    for name, message in (
        ("a.pack", "is not a pack"),
        ("b.pack", "cannot be read"),
        ("c.pack", "no such pack"),
        ("d.zip", r"end in \.pack"),
    ):
        with pytest.raises(UnimetricError, match=message) as error:
            Pack.open(tmp_path / name)
        assert str(tmp_path / name) in error.value.message and error.value.hint


def test_pack_stores_groups(pictures: Table, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.pack", pictures)
    assert (plain.table.group == -1).all() and plain.table.group_names == ()
    group = np.arange(len(pictures)) % 2 - 1
    grouped = replace(pictures, group=group, group_names=("night",), group_rule="group")
    table = write(tmp_path / "grouped.pack", grouped).table
    assert table.group.tolist() == group.tolist() and table.group_names == ("night",) and table.group_rule == "group"
