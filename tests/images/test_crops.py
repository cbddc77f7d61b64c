"""Boxes, and their resampling in batches against torchvision's one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from unimetric.images import crops
from unimetric.images.boxes import Draws, _uniform, center_draws, random_draws
from unimetric.images.crops import canvas_of, color, crop_one, plan_of, squares
from unimetric.images.loading import Resident, Streamed, View
from unimetric.images.packing import write
from unimetric.images.recipe import Recipe
from unimetric.images.table import Table
from unimetric.spec import create, names

MEAN, STD = torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1) / 255  # squares come back as 0..255


def pictures(sizes: np.ndarray) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    waves = [np.add.outer(np.arange(h) * rng.uniform(0.05, 0.9), np.arange(w) * rng.uniform(0.05, 0.9)) for h, w in sizes]
    return [
        np.stack([127 + 120 * np.sin(wave + c) + rng.uniform(-7, 7, wave.shape) for c in range(3)], -1).round().astype(np.uint8)
        for wave in waves
    ]


def in_memory(images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    padded = [np.concatenate([image.reshape(-1, 3), np.zeros((image.shape[0] * image.shape[1], 1), np.uint8)], 1) for image in images]
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in padded])[:-1]])
    return torch.from_numpy(np.concatenate(padded).copy()).view(torch.int32).view(-1), torch.from_numpy(offsets)


SIZES = np.array([[60, 80], [97, 41], [64, 64], [33, 150], [50, 51]])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("scale", [(0.08, 1.0), None])
@pytest.mark.parametrize("epoch", [None, 3])
@pytest.mark.parametrize("size", [28, 41])  # the second is larger than many a resized picture, and black around it
def test_a_batch_equals_torchvision_one_by_one(interpolation, scale, epoch, size) -> None:
    recipe = Recipe(size=size, resize=32, scale=scale, interpolation=interpolation)
    images, rows = pictures(SIZES), np.arange(len(SIZES)) + 10
    draws = center_draws(recipe, SIZES) if epoch is None else random_draws(recipe, SIZES, rows, seed=1, epoch=epoch)
    canvas = canvas_of(recipe, SIZES, random=epoch is not None)
    batch = squares(*in_memory(images), torch.from_numpy(plan_of(draws, SIZES)), MEAN, STD, recipe, canvas)
    for number, image in enumerate(images):
        # As floating-point numbers: for bytes torchvision rounds after each of its two passes.
        own = Draws(**{key: value if key == "crop_first" else value[number : number + 1] for key, value in vars(draws).items()})
        one = crop_one(image.astype(np.float32), own, recipe).clamp(0, 255)
        torch.testing.assert_close(batch[number], one.flip(-1) if draws.flip[number] else one, atol=0.02, rtol=0)


def test_recipe_that_pads_test_images_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    create("transforms", "base(size=256)")
    assert not caplog.text
    create("transforms", "base(size=448)")
    assert "to a short side of 256 pixels, and padded with black to 448; use `resize=512`" in caplog.text


def test_a_test_crop_on_the_pixel_grid_is_exact() -> None:
    recipe = Recipe(size=28, resize=32)
    sizes = np.array([[32, 40], [50, 32]])
    images = pictures(sizes)
    batch = squares(*in_memory(images), torch.from_numpy(plan_of(center_draws(recipe, sizes), sizes)), MEAN, STD, recipe, (50, 40))
    for number, image in enumerate(images):
        whole = V.center_crop(torch.from_numpy(image).permute(2, 0, 1), [28, 28])
        torch.testing.assert_close(batch[number], whole.float(), atol=1e-3, rtol=0)


USUAL = np.array([[256, 341], [256, 256], [256, 384], [41, 78], [341, 256]])
LARGER = np.array([[256, 995], [700, 256], [500, 500]])


@pytest.mark.parametrize("recipe", [*(create("transforms", name) for name in names("transforms")), Recipe(280, 256, ratio=(0.3, 5.0))])
@pytest.mark.parametrize("random", [True, False])
def test_canvas_holds_every_crop(recipe: Recipe, random: bool) -> None:
    sizes = np.repeat(np.concatenate([USUAL, LARGER]), 500, axis=0)
    draws = random_draws(recipe, sizes, np.arange(len(sizes)), seed=0, epoch=0) if random else center_draws(recipe, sizes)
    plan, (height, width) = plan_of(draws, sizes), canvas_of(recipe, sizes, random=random)
    assert (plan[3] - plan[2]).max() <= height and (plan[7] - plan[6]).max() <= width


def test_canvas_is_widened_by_larger_images_not_by_panoramas() -> None:
    recipe = Recipe(size=224, resize=256)
    usual, panoramas, larger = USUAL, np.concatenate([USUAL, LARGER[:2]]), np.concatenate([USUAL, LARGER])
    assert canvas_of(recipe, usual, random=True) == canvas_of(recipe, panoramas, random=True) == (352, 352)
    assert canvas_of(recipe, usual, random=False) == canvas_of(recipe, panoramas, random=False) == (240, 240)
    assert canvas_of(recipe, larger, random=True) == (512, 512)
    assert canvas_of(recipe, larger, random=False) == (448, 448)


def packed(images: list[np.ndarray], folder: Path) -> Table:
    rows = np.arange(len(images))
    for row, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{row}.png")
    paths = tuple(str(folder / f"{row}.png") for row in rows)
    table = Table(paths=paths, labels=rows, class_names=tuple("abcdef"), train=rows >= 0)
    return write(folder / "some.pack", table, short_side=None, encoding="raw").table


@pytest.mark.parametrize("epoch", [None, 3])
@pytest.mark.parametrize("options", [{}, {"interpolation": "bicubic"}, {"scale": None}])
def test_crops_equal_those_on_the_whole_canvas(epoch: int | None, options: dict, tmp_path: Path) -> None:
    sizes = np.array([[64, 85], [64, 64], [64, 300], [200, 64], [130, 130], [21, 30]])
    images, rows = pictures(sizes), np.arange(len(sizes))
    table = packed(images, tmp_path)
    view, cpu = View(Recipe(size=56, resize=64, **options), epoch=epoch), torch.device("cpu")
    loader = Resident(table, device=cpu, where=cpu, mean=(0.5,) * 3, std=(0.2,) * 3)

    draws = view.draws(rows, sizes)
    plan = plan_of(draws, sizes)
    if not draws.crop_first:  # a filter may read the whole image
        plan[[2, 6]], plan[[3, 7]] = 0, sizes.T
    whole = squares(*in_memory(images), torch.from_numpy(plan), loader.cropper.mean, loader.cropper.std, view.recipe, (200, 300))
    # Products of other sizes may add in another order. One of 255 levels is 0.02.
    torch.testing.assert_close(next(loader.load([(rows, view)])), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("epoch", [None, 3])
def test_a_pack_with_one_large_image_is_cropped_image_by_image(epoch: int | None, tmp_path: Path) -> None:
    """As workers crop it: a canvas of the large image takes 85 times the pixels of the others."""
    sizes = np.array([[1500, 1450], *[[150, 170]] * 5])
    rows, table = np.arange(len(sizes)), packed(pictures(sizes), tmp_path)
    cpu = torch.device("cpu")
    loader = Resident(table, device=cpu, where=cpu, mean=(0.5,) * 3, std=(0.2,) * 3)
    streamed = Streamed(table, device=cpu, mean=(0.5,) * 3, std=(0.2,) * 3, workers=0)
    view = View(Recipe(size=56, resize=64), epoch=epoch, view=np.array([0, 1, 0, 1, 0, 1]))
    found = next(loader.load([(rows[::-1], view)]))
    assert torch.equal(found, next(streamed.load([(rows[::-1], view)]))) and loader.arithmetic == streamed.arithmetic
    canvas = loader.cropper.crop(loader.pixels, loader.offsets[rows[::-1]], rows[::-1], view)
    assert (found - canvas).abs().max() < 2.5 / 255 / 0.2  # both are exact, but workers round to bytes


@pytest.mark.parametrize("scale", [(0.08, 1.0), None])
def test_a_large_image_is_resized_in_strips_of_rows(scale, x86: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(size=28, resize=32, scale=scale)
    for image in pictures(SIZES):
        draws = random_draws(recipe, np.array([image.shape[:2]]), np.array([3]), seed=1, epoch=0)
        whole = crop_one(image, draws, recipe)
        with monkeypatch.context() as patch:
            patch.setattr(crops, "_LARGE", 0)
            patch.setattr(crops, "_STRIP", 13)
            patch.setattr(crops, "_RESIZES_BYTES", False)
            # Bytes are resized with weights of 16 bits on x86.
            torch.testing.assert_close(crop_one(image, draws, recipe), whole, atol=1 if x86 else 0, rtol=0)


@pytest.mark.parametrize("epoch", [None, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_narrow_image_is_resized_only_around_its_crop(epoch: int | None, interpolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(Recipe(size=28, resize=32, scale=None, interpolation=interpolation), epoch=epoch)
    for row, (height, width) in enumerate([(7, 1500), (900, 5), (64, 60), (33, 150)]):
        wave = 127 + 120 * np.sin(np.add.outer(np.arange(height), np.arange(width)) / 20)
        image = np.repeat(wave.astype(np.uint8)[:, :, None], 3, 2)
        draws = view.draws(np.array([row]), np.array([image.shape[:2]]))
        whole = crop_one(image, draws, view.recipe)
        with monkeypatch.context() as patch:
            patch.setattr(crops, "MOST_PIXELS", 0)
            part = crop_one(image, draws, view.recipe)
        torch.testing.assert_close(part, whole, atol=6, rtol=0)  # it moves by less than a pixel
    line = np.full((1, 2_000_000, 3), 9, np.uint8)  # whole, it would take 48 gigabytes
    draws = view.draws(np.array([0]), np.array([line.shape[:2]]))
    assert (crop_one(line, draws, Recipe(size=28, resize=32, scale=None)) == 9).all()


@pytest.mark.parametrize("size", [28, 35])  # three pixels are padded by one before and two after
def test_testing_equals_torchvisions_resize_and_centre_crop(size: int) -> None:
    recipe = Recipe(size=size, resize=32)
    official = v2.Compose([v2.Resize(32, antialias=True), v2.CenterCrop(size)])
    for image in pictures(SIZES):
        draws = center_draws(recipe, np.array([image.shape[:2]]))
        torch.testing.assert_close(crop_one(image, draws, recipe), official(torch.from_numpy(image).permute(2, 0, 1)))


def test_random_boxes_follow_torchvisions_law() -> None:
    recipe, count = Recipe(size=28, resize=32), 20_000
    sizes = np.tile([[60, 80]], (count, 1))
    draws = random_draws(recipe, sizes, np.arange(count), seed=0, epoch=0)
    torch.manual_seed(0)
    image = torch.empty(3, 60, 80)
    crop = v2.RandomResizedCrop(28)
    boxes = [crop.make_params([image]) for _ in range(count // 4)]
    official = {key: np.array([box[key] for box in boxes]) for key in ("top", "left", "height", "width")}
    ours = {"top": draws.top, "left": draws.left, "height": draws.box_height, "width": draws.box_width}
    for key, theirs in official.items():
        spread = theirs.std() * np.sqrt(5 / count)
        assert abs(ours[key].mean() - theirs.mean()) < 5 * spread, key
    assert 0.48 < draws.flip.mean() < 0.52
    assert (draws.top + draws.box_height <= 60).all()
    assert (draws.left + draws.box_width <= 80).all()


def test_dice_depend_on_seed_epoch_view_and_row_only() -> None:
    recipe = create("transforms", "adv")
    sizes = np.tile([[60, 80]], (6, 1))

    def boxes(rows, **keys) -> np.ndarray:
        return plan_of(random_draws(recipe, sizes[: len(rows)], np.array(rows), **{"seed": 0, "epoch": 0} | keys), sizes[: len(rows)])

    whole = boxes([0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(boxes([4, 2]), whole[:, [4, 2]])  # whoever else is in the batch
    for keys in ({"seed": 1}, {"epoch": 1}, {"view": 1}):
        assert (boxes([0, 1, 2, 3, 4, 5], **keys) != whole).any()
    numbers = _uniform(4, np.arange(50_000), 3, 1, 4)
    assert abs(numbers.mean() - 0.5) < 0.005
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.02


def test_colours_equal_torchvisions() -> None:
    recipe = Recipe(size=16, resize=16, jitter=0.2, grayscale=0.5)
    images = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    sizes = np.ones((6, 2))
    draws = random_draws(recipe, sizes, np.arange(6), seed=0, epoch=0)
    ours = color(images, torch.from_numpy(plan_of(draws, sizes)), torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), recipe)
    for number in range(6):
        one = images[number] / 255
        one = V.rgb_to_grayscale(one, 3) if draws.gray[number] else one
        one = V.adjust_brightness(one, draws.brightness[number])
        one = V.adjust_contrast(one, draws.contrast[number])
        one = V.adjust_saturation(one, draws.saturation[number])
        one = V.adjust_hue(one, draws.hue[number])
        torch.testing.assert_close(ours[number], one, atol=2e-3, rtol=0)
    assert draws.gray.any()
    assert not draws.gray.all()


@pytest.mark.parametrize("name", names("transforms"))
def test_every_transform_builds_a_recipe(name: str) -> None:
    recipe = create("transforms", name)
    assert isinstance(recipe, Recipe)
    assert recipe.resize >= recipe.size
