"""A report in one HTML file: a table, pictures and words; nothing in it is loaded from elsewhere.

The page follows the reader's choice of light or dark, is readable on a telephone, and forbids by its own
content policy that anything be fetched. What it says is the caller's; this room only sets it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from dubito.plots import to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "report.html"
_STACKED = (
    5  # columns that fit on a telephone once the rows' names stand above their cells; more are scrolled
)


class ReportFolderError(OSError):
    """The folder of the report cannot be made or written to."""


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows in words (for those who cannot see it), and a caption above it."""

    figure: Figure
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the table: what is measured, how to read it, and one cell a column."""

    label: str
    cells: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """What is compared (a column each) by what is measured (a row each)."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"row {row.label!r} has {len(row.cells)} cells, the table {len(self.columns)} columns"
                )


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, terms with their explanations, pictures and tables; any may be missing."""

    title: str
    paragraphs: tuple[str, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Report:
    """All of a page: a title, what comes first, the table, and sections."""

    title: str
    lead: tuple[str, ...] = ()
    table: Table | None = None
    sections: Sequence[Section] = field(default=())


def check_report_folder(folder: str | os.PathLike[str]) -> Path:
    """Make the folder if need be and prove that a file can be written there; leaves no file behind.

    To be called before hours are spent on what is to be reported.

    Raises:
        ReportFolderError: naming the folder and what is in the way.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReportFolderError(
            f"the report cannot be written to {str(path)!r}: {reason}. Choose a folder you may write to."
        ) from error
    return path


def write_report(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into ``folder``, whole or not at all; returns its path.

    Raises:
        ReportFolderError: if the folder cannot be written to.
    """
    return write_whole(check_report_folder(folder) / FILE_NAME, render(report))


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that a reader finds the old one or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def render(report: Report) -> str:
    """The report as a complete HTML document; all text is escaped."""
    title = escape(report.title)
    body = [f"<h1>{title}</h1>", *(f'<p class="lead">{escape(text)}</p>' for text in report.lead)]
    if report.table is not None:
        body.append(_table(report.table))
    body += [_section(section, f"s{number}") for number, section in enumerate(report.sections)]
    return Template(_PAGE).substitute(TITLE=title, STYLE=_STYLE, BODY="\n".join(body))


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = []
    for row in table.rows:
        note = f"<small>{escape(row.note)}</small>" if row.note else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        rows.append(f'<tr><th scope="row">{escape(row.label)}{note}</th>{cells}</tr>')
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    inner = f"{caption}<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    kind = (
        f' class="stacked" style="--columns: {len(table.columns)}"' if len(table.columns) <= _STACKED else ""
    )
    # tabindex: what scrolls sideways must be reachable by keyboard
    return f'<div class="wide" tabindex="0" role="region" aria-label="results"><table{kind}>{inner}</table></div>'


def _section(section: Section, prefix: str) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    if section.terms:
        terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in section.terms)
        parts.append(f"<dl>{terms}</dl>")
    parts += [_table(table) for table in section.tables]
    if section.pictures:
        figures = (_picture(picture, f"{prefix}f{i}") for i, picture in enumerate(section.pictures))
        parts.append(f'<div class="pictures">{"".join(figures)}</div>')
    return f"<section>{''.join(parts)}</section>"


def _picture(picture: Picture, prefix: str) -> str:
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    return f"<figure>{caption}{to_svg(picture.figure, picture.alt, prefix)}</figure>"


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --quiet: #59626d; --paper: #fdfdfc; --line: #d9dde2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --quiet: #9aa4b0; --paper: #14171b; --line: #343a42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p, dd { max-width: 44rem; }
p { margin: .5rem 0; }
.lead { font-size: 1.05rem; }
.wide { overflow-x: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); font-size: .9rem; padding-bottom: .5rem; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { text-align: right; vertical-align: bottom; }
tbody th { text-align: left; font-weight: 600; position: sticky; left: 0; background: var(--paper);
  min-width: 8.5rem; }
tbody td { text-align: right; white-space: nowrap; }
small { display: block; font-weight: 400; font-size: .8rem; color: var(--quiet); }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0; }
.pictures { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: .5rem 0; max-width: 32rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .9rem; color: var(--quiet); margin-bottom: .3rem; }
@media (max-width: 40rem) {
  th, td { padding: .3rem .25rem; font-size: .8rem; }
  thead th { font-size: .7rem; padding-inline: .1rem .2rem; overflow-wrap: anywhere; }
  tbody th { max-width: 8rem; }
  .stacked, .stacked thead, .stacked tbody, .stacked caption { display: block; }
  .stacked tr { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
  .stacked thead td { display: none; }
  .stacked th, .stacked td { border-bottom: 0; text-align: right; white-space: normal; }
  .stacked tbody th { grid-column: 1 / -1; max-width: none; text-align: left; position: static;
    border-top: 1px solid var(--line); padding-bottom: 0; }
  .stacked small { display: inline; margin-left: .5rem; }
}
@media print { .wide { overflow: visible; } section { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>$TITLE</title>
<style>$STYLE</style>
</head>
<body>
<main>
$BODY
</main>
</body>
</html>
"""
