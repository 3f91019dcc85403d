from test_house import ROOT, python, readme_script


def test_the_pages_code_runs(tmp_path):
    script = tmp_path / "page.py"
    script.write_text(readme_script((ROOT / "docs" / "certificates.md").read_text()))
    run = python(str(script), cwd=tmp_path)
    assert run.returncode == 0, f"line numbers are the page's:\n{run.stderr[-3000:]}"
    for said in ("Eckart-Young-Mirsky", "PAC-Bayes", "forecast", "Gaussian complexity", "assumes"):
        assert said in run.stdout
