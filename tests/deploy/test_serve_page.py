"""The search page in a browser: every way to search, filters, votes, the map, and errors."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pip install 'unimetric[serve]'")

from unimetric import Index

ID = "images/class 1/a&b #3.png"


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a new window. No error and no foreign address may occur."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(address: str, **options: Any) -> Any:
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if "Failed to load resource" not in message.text else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert not [url for url in asked if not url.startswith(("http://127.0.0.1", "blob:", "data:"))]


def wait_for(check: Callable[[], Any], seconds: float = 90) -> Any:
    """Wait until a function returns something. The policy of the page forbids Playwright's own way."""
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.02)
    return found


def wait_for_answer(page: Any, number: int) -> None:
    wait_for(lambda: page.evaluate("state.number") >= number and page.evaluate("!document.querySelector('#drop.busy')"))


def file_of(index: Path, id_: str = ID) -> Path:
    with Index.open(index, device="cpu") as held:
        return Path(held.image_path(id_))


SEND = """([kind, data]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "x.png", { type: "image/png" }));
  const paste = new ClipboardEvent("paste", { clipboardData: transfer });
  const event = kind === "paste" ? paste : new DragEvent("drop", { dataTransfer: transfer, cancelable: true });
  window.dispatchEvent(event);
}"""


def test_upload_filter_click_crop_and_vote(index: Path, live: Callable[..., str], opened: Callable[..., Any]) -> None:
    (index / "thresholds.json").write_text(json.dumps({"threshold": 0.9999, "fpr": 0.01}))
    page = opened(live(index, feedback=index))
    wait_for(lambda: "32 images" in page.locator("#about").inner_text())
    page.set_input_files("#file", file_of(index))
    wait_for_answer(page, 1)
    assert page.locator(".item").count() == 24
    assert page.locator("#verdict b").inner_text() == "Known: green"
    assert page.locator(".item .name").first.inner_text() == "green"
    assert page.locator(".line").count() <= 1
    wait_for(lambda: page.evaluate("[...document.querySelectorAll('.item img')].slice(0, 4).every((each) => each.naturalWidth)"))

    page.select_option("#filters select[name=label]", "o'range")
    wait_for_answer(page, 2)
    assert set(page.locator(".item .name").all_inner_texts()) == {"o'range"}
    page.fill("#filters input[aria-label='price at least']", "6")
    page.keyboard.press("Tab")
    wait_for_answer(page, 3)
    assert page.locator(".item").count() == 2
    page.select_option("#filters select[name=label]", "gray")
    page.fill("#filters input[aria-label='price at most']", "7")
    page.keyboard.press("Tab")
    wait_for(lambda: page.locator(".empty").count() == 1)
    assert "No image matches" in page.locator(".empty").inner_text()
    page.fill("#filters input[aria-label='price at most']", "")
    page.fill("#filters input[aria-label='price at least']", "")
    page.select_option("#filters select[name=label]", "")
    wait_for_answer(page, page.evaluate("state.number"))
    assert page.locator(".item").count() == 24

    page.locator(".vote.down").nth(2).click()
    wait_for(lambda: page.locator(".vote.down").nth(2).get_attribute("aria-pressed") == "true")
    page.locator(".item > button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    wait_for(lambda: page.locator(".vote.up").nth(1).get_attribute("aria-pressed") == "true")
    number = page.evaluate("state.number")
    page.select_option("#filters select[name=new]", "true")
    page.select_option("#filters select[name=new]", "")
    wait_for_answer(page, number + 2)
    assert page.locator(".vote.down").nth(2).get_attribute("aria-pressed") == "true"  # votes outlive a new search with the same image
    page.locator(".item > button").nth(1).focus()
    votes = [json.loads(line) for line in (index / "feedback.jsonl").read_text().splitlines()]
    assert [vote["vote"] for vote in votes] == ["down", "up"] and Path(votes[0]["query"]).read_bytes() == file_of(index).read_bytes()

    before = page.evaluate("state.number")
    chosen = page.evaluate("state.answer.hits[1].id")
    page.keyboard.press("Enter")  # searches with the focused result
    wait_for_answer(page, before + 1)
    assert page.evaluate("state.query.id") == chosen and "#id=" in page.url
    assert chosen not in page.evaluate("state.answer.hits.map((hit) => hit.id)")
    page.reload()
    wait_for(lambda: page.locator(".item").count() == 24)
    assert page.evaluate("state.query.id") == chosen

    page.locator("#crop").click()
    box = wait_for(lambda: page.locator("#query").bounding_box())
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 5)
    assert page.locator("#selection").is_visible()
    page.mouse.up()
    wait_for(lambda: page.evaluate("Boolean(state.query.file)"))
    wait_for_answer(page, page.evaluate("state.number"))
    assert page.locator("#query").evaluate("(image) => image.naturalWidth") < 40
    page.go_back()
    wait_for(lambda: page.evaluate("state.query.id") == chosen)


def test_large_transparent_image_is_sent_unchanged(
    index: Path, live: Callable[..., str], opened: Callable[..., Any], tmp_path: Path
) -> None:
    file, photo = tmp_path / "cutout.png", tmp_path / "photo.jpg"
    Image.new("RGBA", (2400, 1600), (9, 99, 200, 0)).save(file)
    Image.new("RGB", (2400, 1600), (9, 99, 200)).save(photo)
    page = opened(live(index, feedback=index))
    wait_for(lambda: page.evaluate("Boolean(state.info)"))
    for number, each in enumerate((file, photo), 1):
        page.set_input_files("#file", each)
        wait_for_answer(page, number)
        page.locator(".vote.up").first.click()
        wait_for(lambda: page.locator(".vote.up").first.get_attribute("aria-pressed") == "true")
    stored = {each.suffix: each for each in (index / "feedback").iterdir()}
    assert stored[".png"].read_bytes() == file.read_bytes()
    assert Image.open(stored[".jpg"]).size == (2048, 1365)


def test_paste_drop_and_wrong_file(index: Path, live: Callable[..., str], opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(live(index))
    wait_for(lambda: page.evaluate("Boolean(state.info)"))
    data = base64.b64encode(file_of(index).read_bytes()).decode()
    for number, kind in enumerate(("paste", "drop")):
        page.evaluate(SEND, [kind, data])
        wait_for_answer(page, number + 1)
        assert page.evaluate("state.answer.hits[0].id") == ID
    assert page.locator(".vote").count() == 0 and page.locator("#votes").is_hidden()  # votes are not stored
    (tmp_path / "wrong.jpg").write_bytes(b"no image")
    page.set_input_files("#file", tmp_path / "wrong.jpg")
    wait_for(lambda: "not an image" in page.locator("#message").inner_text())
    assert page.locator(".item").count() == 0
    page.set_input_files("#file", file_of(index))
    wait_for(lambda: page.locator(".item").count() == 24)


def test_map_on_a_phone_and_new_version(index: Path, colored: Path, live: Callable[..., str], opened: Callable[..., Any]) -> None:
    page = opened(live(index), color_scheme="dark", is_mobile=True, has_touch=True)
    page.set_viewport_size({"width": 390, "height": 844})
    wait_for(lambda: page.evaluate("Boolean(state.info)"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#show-map").click()
    wait_for(lambda: page.evaluate("Boolean(state.map)"))
    assert "32 images by PCA" in page.locator("#atlas-note").inner_text()
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#map").bounding_box()
    x, y = page.evaluate("placeOf(5)")
    page.touchscreen.tap(box["x"] + x, box["y"] + y)
    wait_for(lambda: page.locator("#tip img").is_visible())
    page.touchscreen.tap(box["x"] + x, box["y"] + y)
    wait_for(lambda: page.evaluate("Boolean(state.answer)"))
    assert page.locator("#found").is_visible() and page.evaluate("state.query.id").startswith("images/class ")
    page.evaluate("view('map')")
    page.locator("#map").focus()
    page.keyboard.press("+")
    assert page.evaluate("camera.zoom") > 1

    rows = (colored / "images.csv").read_text().splitlines()
    (colored / "some.csv").write_text("\n".join(rows[:-8]))
    with Index.open(index, device="cpu") as held:
        held.update(colored / "some.csv", workers=0)
    page.evaluate("view('search')")

    def search_again() -> bool:
        page.evaluate("search()")
        time.sleep(0.2)
        return "24 images" in page.locator("#about").inner_text()

    wait_for(search_again)


def test_token_and_empty_index(index: Path, live: Callable[..., str], opened: Callable[..., Any]) -> None:
    with Index.open(index, device="cpu") as held:
        held.store.delete([id_ for ids, *_ in held.store.scan() for id_ in ids])
    page = opened(live(index, token="0123456789abcdef"))
    wait_for(lambda: page.locator("#sign-in").is_visible())
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    wait_for(lambda: page.locator("#wrong").is_visible())
    page.fill("#token", "0123456789abcdef")
    page.keyboard.press("Enter")
    wait_for(lambda: "0 images" in page.locator("#about").inner_text())
    assert "empty" in page.locator(".empty").inner_text()
    page.locator("#show-map").click()
    wait_for(lambda: page.evaluate("Boolean(state.map)"))


def test_address_with_a_bare_percent_sign(index: Path, live: Callable[..., str], opened: Callable[..., Any]) -> None:
    page = opened(live(index) + "/#id=100%.png")
    wait_for(lambda: "Unknown id `100%.png`" in page.locator("#message").inner_text())


def test_docs_page(index: Path, live: Callable[..., str], opened: Callable[..., Any]) -> None:
    page = opened(live(index) + "/docs")
    wait_for(lambda: page.locator("h2").count() > 6)
    assert "POST /search" in page.locator("h2").all_inner_texts()
