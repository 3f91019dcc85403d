"""The page on propagation: its code runs."""

from pathlib import Path

from test_house import ROOT, python, readme_script


def test_the_pages_code_runs(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(readme_script((ROOT / "docs" / "moments.md").read_text()))
    run = python(str(script), cwd=tmp_path)
    assert run.returncode == 0, f"line numbers are the page's:\n{run.stderr[-3000:]}"
