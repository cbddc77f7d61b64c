"""Audit of an index: one page with images, and a csv file per audit."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from unimetric.deploy.index import Index, sample_gallery
from unimetric.errors import UnimetricError, counted
from unimetric.files import check_writable, write_text
from unimetric.geometry.space import Space
from unimetric.images.pack import decode, make_thumbnail
from unimetric.kinds import Audited, Findings
from unimetric.report import page as report_page
from unimetric.report.escape import csv_text, for_csv, for_html
from unimetric.spec import bind_arguments, create, parse

_log = logging.getLogger("unimetric")
AUDITS = ("near_duplicates", "suspicious_labels", "worst_classes", "clusters", "outliers")
#: Audits that find nothing in an index without labels.
_LABELED = ("suspicious_labels", "worst_classes")
#: Images whose embeddings are compared. Of a larger gallery, every n-th image is used.
_MOST = 200_000
_SIDE = 112
_STYLE = """
.group { margin: 14px 0; } .group > p { margin: 0 0 4px; font-size: 14px; } .images { display: flex; flex-wrap: wrap; gap: 8px; }
.images figure { width: 120px; padding: 4px; } .images img, .gone { display: block; width: 110px; height: 110px; border-radius: 4px; }
.images img { object-fit: cover; background: #fff; } .gone { color: var(--soft); border: 1px dashed var(--line); }
.images figcaption { font-weight: 400; font-size: 11px; line-height: 1.3; margin: 3px 0 0; color: var(--soft); }
.images figcaption { overflow: hidden; overflow-wrap: anywhere; max-height: 2.6em; } .none { color: var(--same); }
"""


def audit(
    path: str | Path,
    out: str | Path,
    *,
    audits: Sequence[str] = AUDITS,
    label: str = "label",
    most: int = 40,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Findings]:
    """Run audits on an index, and write a page and one csv file per audit.

    Args:
        path: Index folder.
        out: Output file with the extension `.html`. The csv files have its name and that of the audit.
        audits: Spec strings of audits.
        label: Column of the classes.
        most: Largest number of findings per audit on the page. The csv file has all.
        progress: Callback with (name of a step, finished items, all items).

    Returns:
        The findings of each audit. Without labels, those audits that need them are left out.
    """
    out = Path(out)
    check_writable(out)
    if out.suffix != ".html":
        raise UnimetricError(f"`--out` must end in .html, got {out}", f"use `--out {out.with_suffix('.html')}`")
    if not audits:
        raise UnimetricError("at least one audit is required", f"choose from {', '.join(AUDITS)}")
    for text in audits:
        bind_arguments("audits", text)  # a wrong name or argument is reported before anything is read
    with Index.open(path).check_complete() as index:
        gallery, total = read_gallery(index, label=label, progress=progress or (lambda name, done, all_: None))
        audits = _without_labels(index, audits) if label not in index.columns else audits
        found = {text: create("audits", text, gallery=gallery) for text in audits}
        note = f"{index.path.name}: {counted(total, 'image')}"
        if total > len(gallery.ids):
            note += f", every {-(-total // _MOST)}th of them audited"
        files = _file_names(out, found)
        for text, findings in found.items():
            if findings.rows:
                write_text(files[text], as_csv(findings))
            else:  # no file of an earlier audit, whose findings have been fixed
                files[text].unlink(missing_ok=True)
        write_text(out, as_html(found, note, files, index, most=most, progress=gallery.progress))
    return found


def _without_labels(index: Index, audits: Sequence[str]) -> list[str]:
    """Return the audits of an index that has no labels, and log which ones are left out."""
    needing = [parse(text).name for text in audits if parse(text).name in _LABELED]
    problem = f"{index.path}: has no column `label`, without which {' and '.join(needing)} cannot run"
    hint = f"use `--label` with one of {', '.join(index.columns)}" if index.columns else "build it with `--labels` or a csv file"
    if len(needing) == len(audits):
        raise UnimetricError(problem, hint)
    if needing:
        _log.warning("%s; %s", problem, hint)
    return [text for text in audits if parse(text).name not in _LABELED]


def _file_names(out: Path, found: dict[str, Findings]) -> dict[str, Path]:
    """Return the csv file of each audit. An audit that was run twice gets a number."""
    names: dict[str, Path] = {}
    for text in found:
        name = parse(text).name
        times = sum(parse(other).name == name for other in names)
        names[text] = out.with_suffix(f".{name}{times + 1 if times else ''}.csv")
    return names


def read_gallery(index: Index, *, label: str, progress: Callable[[str, int, int], None]) -> tuple[Audited, int]:
    """Return the images of an index for audits, and the number of all its images.

    Args:
        index: Open index.
        label: Column of the classes. An index without it has no classes.
        progress: Callback of the audits.
    """
    total = len(index)
    if not total:
        raise UnimetricError(f"{index.path}: has no images", "add some with `unimetric index`")
    if label != "label" and label not in index.columns:
        raise UnimetricError(f"{index.path}: has no column `{label}`", f"choose from {', '.join(index.columns) or 'none'}")
    ids, points, columns = sample_gallery(index, _MOST)
    labels = columns.get(label, [None] * len(ids))
    numbers = {value: number for number, value in enumerate(dict.fromkeys(labels))}
    classes = np.array([numbers[value] for value in labels])
    placement = index.facts.placement
    space = Space(points, classes, geometry=placement.geometry, curvature=placement.curvature)

    def read(id_: str) -> np.ndarray | None:
        try:
            return decode(index.image_path(id_))
        except UnimetricError:  # it has been removed since
            return None

    return Audited(space, ids, labels, columns, read, progress), total


def as_csv(findings: Findings) -> str:
    """Return the rows of findings as csv text."""
    names = list(findings.rows[0])
    rows = [[row[name] for name in names] for row in findings.rows]
    return csv_text([names, *([for_csv(value) if isinstance(value, str) else value for value in row] for row in rows)])


def _thumbnail(index: Index, id_: str) -> str:
    """Return the element of an image, which contains its thumbnail."""
    try:
        data = base64.b64encode(make_thumbnail(index.image_path(id_), _SIDE, 75)).decode()
        return f'<img src="data:image/jpeg;base64,{data}" alt="">'
    except (UnimetricError, OSError):
        return '<div class="gone">not readable</div>'


def as_html(
    found: dict[str, Findings], note: str, files: dict[str, Path], index: Index, *, most: int, progress: Callable[[str, int, int], None]
) -> str:
    """Return the page of all findings."""
    thumbnail = cache(partial(_thumbnail, index))  # an image may be in several findings
    sections, links = [], []
    total = sum(min(most, len(findings.groups)) for findings in found.values())
    done = 0
    for text, findings in found.items():
        anchor = for_html(parse(text).name)
        links.append(f'<a href="#{anchor}">{for_html(findings.title)}</a>')
        body = [f'<section id="{anchor}"><h2>{for_html(findings.title)}</h2><p>{for_html(findings.note)}</p>']
        if not findings.groups:
            body.append('<p class="none">Nothing was found.</p>')
        else:
            shown = min(most, len(findings.groups))
            body.append(f"<p>{shown:,} of {len(findings.groups):,} findings; all are in <code>{for_html(files[text].name)}</code>.</p>")
        for group in findings.groups[:most]:
            images = zip(group.ids, group.names, strict=True)
            cells = "".join(
                f'<figure title="{for_html(id_)}">{thumbnail(id_)}<figcaption>{for_html(name or Path(id_).name)}</figcaption></figure>'
                for id_, name in images
            )
            body.append(f'<div class="group"><p>{for_html(group.caption)}</p><div class="images">{cells}</div></div>')
            done += 1
            progress("thumbnails", done, total)
        sections.append("".join(body) + "</section>")
    style = Path(report_page.__file__).with_name("page.css").read_text(encoding="utf-8") + _STYLE
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<link rel="icon" href="data:,">\n'
        f"<title>Unimetric: audit</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>Unimetric</h1><p>{for_html(note)}</p><nav>{''.join(links)}</nav></header>\n<main>{''.join(sections)}</main>\n</body>\n</html>\n"
    )
