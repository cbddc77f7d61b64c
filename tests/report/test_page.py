"""The report in a browser: all sections, tooltips, no requests, no console messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unimetric.report import report


def test_report_in_browser(chromium, runs: Callable[..., Path], tmp_path: Path) -> None:
    report([runs(8)], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 10 * 2**20
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())

    assert page.locator("table.results tbody tr").count() == 4
    assert page.locator("table.results b").count() == 1
    title = page.locator("table.results .paper").first.get_attribute("title")
    assert title == "Roth et al. 2020, tables 2 and 4; differs: epochs 4, the paper 150"
    assert page.locator("#results .note").count() == 5
    for section, plots in (("curves", 3), ("structure", 1), ("spectra", 1)):
        assert page.locator(f"#{section} figure svg").count() == plots
        assert page.locator(f"#{section} svg polyline, #{section} svg circle").count() > 4
    assert page.locator("#shift").is_hidden()  # one split only
    assert page.locator("#galleries option").count() == 8
    assert page.locator("#gallery .row").count() == 3
    assert page.locator("#gallery .row img").count() == 3 * 5
    assert page.locator("#gallery .row img.same").count() + page.locator("#gallery .row img.other").count() == 3 * 4
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert page.locator("#gallery .map circle").count() == 24
    assert page.locator("#gallery .row figcaption").first.inner_text().startswith("class </script><!--<script> ")
    assert page.locator("#gallery .row img").first.evaluate("(image) => image.clientWidth") == 96
    assert ", score " in page.locator("#gallery .row img").nth(1).get_attribute("title")
    assert page.locator("#classes tbody tr").count() == 6
    assert page.locator("#classes tbody tr").first.inner_text().split("\t") == ["class 0", "25.0", "4", "class 5"]
    assert page.locator("#runs details").count() == 8

    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator("#gallery .map circle").nth(5).hover(force=True)
    assert tip.is_visible()
    assert tip.locator("img").evaluate("(image) => image.naturalWidth") > 0
    assert tip.inner_text().strip().startswith("class </script><!--<script> ")  # text, not the end of the script
    page.mouse.move(2, 2)
    assert tip.is_hidden()
    plot = page.locator("#curves svg").first
    plot.scroll_into_view_if_needed()
    box = plot.locator("circle").first.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    assert "epoch" in tip.inner_text()

    page.locator("#curves .legend button").first.click()
    assert page.locator("#curves svg").first.locator("g").first.get_attribute("visibility") == "hidden"
    before = page.locator("#gallery img").evaluate_all("(all) => all.map((each) => each.title)")
    page.locator("#galleries select").select_option("7")
    assert page.locator("#gallery img").evaluate_all("(all) => all.map((each) => each.title)") != before
    page.locator("table.results th").nth(2).click()
    assert page.locator("table.results tbody tr td").first.inner_text() == "margin(beta=1.2) <3>"
    page.locator("#runs summary").first.click()
    assert "optimizer" in page.locator("#runs details pre").first.inner_text()

    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()
