import os
import re
from html.parser import HTMLParser

import pytest
import torch

from dubito import plots
from dubito.report import (
    Picture,
    Report,
    ReportFolderError,
    Row,
    Section,
    Table,
    check_report_folder,
    render,
    write_report,
)

VOID = {"meta", "img", "br", "link", "hr"}


class Checker(HTMLParser):
    """Every element closed in order; every id once; every address noted."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.addresses, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.note(attrs)

    def handle_startendtag(self, tag, attrs):
        self.note(attrs)

    def note(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "poster", "srcset"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def report():
    figures = [plots.ood_histogram(torch.rand(20), torch.rand(20)) for _ in range(2)]
    figures.append(plots.image_grid(torch.rand(2, 1, 8, 8), ["a", "<b>"]))
    pictures = tuple(Picture(figure, "an <alt>", "a caption & more") for figure in figures)
    table = Table(("one", "two <x>"), (Row("accuracy", ("97.1 %", "96.0 %"), "higher is better"),), "caption")
    sections = (
        Section("First", ("text $BODY",), (("term", "meaning"),), pictures),
        Section("Second", pictures=pictures[:1]),
    )
    return Report("A <title> & $STYLE", ("lead <script>alert(1)</script>",), table, sections)


def test_page_is_well_formed_and_self_contained(report):
    page = render(report)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.ids
    assert checker.addresses
    assert all(address.startswith(("data:", "#")) for address in checker.addresses)
    without_names = page.replace("http://www.w3.org/1999/xlink", "").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|<script|<link", without_names)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


def test_everything_said_is_there_and_escaped(report):
    checker = Checker()
    checker.feed(render(report))
    text = "".join(checker.text)
    for said in (
        "A <title> & $STYLE", "lead <script>alert(1)</script>", "two <x>", "97.1 %", "higher is better",
        "First", "text $BODY", "term", "meaning", "a caption & more", "an <alt>", "<b>",
    ):  # fmt: skip
        assert said in text, said


def test_write_replaces_whole_and_leaves_nothing_else(tmp_path, report):
    folder = tmp_path / "new" / "folder"
    path = write_report(report, folder)
    assert path == folder / "report.html"
    first = path.read_text(encoding="utf-8")
    assert first.startswith("<!doctype html>")
    assert write_report(Report("Other"), folder) == path
    assert "Other" in path.read_text(encoding="utf-8")
    assert [p.name for p in folder.iterdir()] == ["report.html"]


def test_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "taken").write_text("x")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(ReportFolderError, match="taken"):
            check_report_folder(folder)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ReportFolderError, match="may write"):
        check_report_folder(tmp_path)


def test_check_leaves_no_file_behind(tmp_path):
    assert check_report_folder(tmp_path / "a") == tmp_path / "a"
    assert list((tmp_path / "a").iterdir()) == []


def test_rows_must_fit_the_columns():
    with pytest.raises(ValueError, match="accuracy"):
        Table(("one", "two"), (Row("accuracy", ("1",)),))
