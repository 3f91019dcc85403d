"""The rules of the house that a tool can check: imports, who may know whom, sizes, names, docstrings."""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import dubito

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dubito"

LAZY = {"torchmetrics", "matplotlib", "accelerate", "typer", "rich", "scipy", "pandas", "transformers"}
LAZY |= {"sklearn", "mlxtend", "safetensors", "tokenizers", "pyro"}
MAX_LINES = 500
MAX_FUNCTION_LINES = 60
NAMELESS = frozenset({"utils", "util", "helpers", "helper", "misc", "core", "common"})

# What a room may not know, directly or through others: HOUSE where nothing else is said.
FRONT = frozenset({"plots", "rank_plots", "report", "cli", "experiments"})
HOUSE = FRONT | {"training", "data"}
FORBIDDEN = {
    "amortised": FRONT,
    "posthoc": FRONT,
    "training": FRONT,
    "data": FRONT | {"training"},
    "plots": frozenset({"rank_plots", "report", "cli", "experiments"}),
    "rank_plots": frozenset({"report", "cli", "experiments"}),
    "report": frozenset({"cli", "experiments"}),
    "experiments": frozenset({"cli"}),
    "cli": frozenset[str](),
}
HOT = ("weights", "bayesian", "monte_carlo")


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a fresh process: one thread, no hub, nothing added to the path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


# -------------------------------------------------------------------------------------- importing the package


def test_import_budget_leaves_the_heavy_packages_out() -> None:
    run = python("-c", "import sys, dubito; print('\\n'.join(sys.modules))")
    assert run.returncode == 0, run.stderr
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert {"torch", "dubito"} <= loaded, "the probe did not see what was imported"
    assert not loaded & LAZY, f"import these inside the functions that need them: {sorted(loaded & LAZY)}"


def test_import_raises_no_warning() -> None:
    run = python("-W", "error", "-c", "import dubito")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


def test_one_version_everywhere() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = re.search(r"^version: *\"?([^\"\n]+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert dubito.__version__ == declared
    assert cited is not None
    assert cited[1] == declared


# ----------------------------------------------------------------------------------------------- sizes, names


def sources(*folders: str) -> list[Path]:
    """Python files under the named folders of the repository (all that hold code, by default)."""
    named = folders or ("src", "tests", "benchmarks", "docs", "examples")
    return sorted(path for folder in named for path in (ROOT / folder).rglob("*.py"))


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}": f.end_lineno - f.lineno + 1
        for path in sources("src")
        for f in functions_of(ast.parse(path.read_text()))
        if f.end_lineno is not None and f.end_lineno - f.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_files_and_folders_have_names_that_say_what_is_in_them() -> None:
    names = {p for path in sources() for p in (path, *path.relative_to(ROOT).parents)}
    bad = [str(p) for p in names if p.stem.removeprefix("test_").strip("_") in NAMELESS]
    assert bad == []


def test_test_files_have_unique_names() -> None:
    stems = [path.stem for path in sources("tests") if path.stem not in {"conftest", "__init__"}]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []


# ----------------------------------------------------------------------------------------------- public names


def public_objects() -> dict[str, object]:
    """Every name in `dubito.__all__` that dubito itself defines."""
    found = {name: getattr(dubito, name) for name in dubito.__all__}
    return {
        name: thing
        for name, thing in found.items()
        if isinstance(thing, types.ModuleType) or getattr(thing, "__module__", "").startswith("dubito")
    }


def own_docstring(thing: object) -> str | None:
    """The docstring somebody wrote: not one inherited, nor one that dataclass or NamedTuple makes up."""
    text = thing.__dict__.get("__doc__") if isinstance(thing, type) else getattr(thing, "__doc__", None)
    if text and isinstance(thing, type) and text.startswith(f"{thing.__name__}("):
        return None
    return text


def callables_of(name: str, thing: object) -> Iterator[tuple[str, types.FunctionType]]:
    """The function itself, or the public methods (and constructor) that a class's own body defines."""
    if isinstance(thing, types.FunctionType):
        yield name, thing
    if not isinstance(thing, type):
        return
    made_up = dataclasses.is_dataclass(thing)
    for attribute, value in vars(thing).items():
        method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        public = not attribute.startswith("_") or (attribute == "__init__" and not made_up)
        if public and isinstance(method, types.FunctionType) and method.__module__.startswith("dubito"):
            yield f"{name}.{attribute}", method


def missing_annotations(function: types.FunctionType) -> list[str]:
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.annotation is empty and p.name not in ("self", "cls")
    ]
    return missing + (["return"] if signature.return_annotation is empty else [])


def test_all_names_exist_once_and_are_public() -> None:
    assert len(dubito.__all__) == len(set(dubito.__all__))
    assert [name for name in dubito.__all__ if name.startswith("_") and name != "__version__"] == []
    assert {"bayesianize", "MeanField", "Predictive"} <= set(public_objects())


def test_public_names_have_docstrings() -> None:
    things = public_objects()
    bare = [name for name, thing in things.items() if callable(thing) and not own_docstring(thing)]
    bare += [
        name for name, thing in things.items() if isinstance(thing, types.ModuleType) and not thing.__doc__
    ]
    assert bare == []


def test_public_functions_are_annotated() -> None:
    found = [pair for name, thing in public_objects().items() for pair in callables_of(name, thing)]
    assert found
    assert {name: gaps for name, function in found if (gaps := missing_annotations(function))} == {}


def test_the_checks_of_public_names_can_fail() -> None:
    class Bare:
        def method(self, x):  # type: ignore[no-untyped-def]
            return x

    Bare.method.__module__ = "dubito.made_up"
    assert own_docstring(Bare) is None
    assert own_docstring(dataclasses.make_dataclass("Made", ["x"])) is None
    assert {name: missing_annotations(f) for name, f in callables_of("Bare", Bare)} == {
        "Bare.method": ["x", "return"]
    }


# ------------------------------------------------------------------------------------------------------ rooms


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, package: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever it does; relative imports resolved."""
    here = module_name(path, package).split(".")
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            depth = len(here) - node.level + (path.name == "__init__.py")
            base = ".".join([*(here[:depth] if node.level else []), *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str:
    """`dubito.weights.point` -> `weights`; the package itself -> ``."""
    return module.split(".")[1] if "." in module else ""


def room_graph(package: Path) -> dict[str, set[str]]:
    """Which rooms each room's files import. The package's own `__init__` is the room with the empty name."""
    rooms = {p.stem for p in package.iterdir() if p.is_dir() or p.suffix == ".py"} - {
        "__init__",
        "__pycache__",
    }
    graph: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        known = graph.setdefault(room_of(module_name(path, package)), set())
        for name in imports_of(path, package):
            if name.split(".")[0] == package.name:
                known.add(room if (room := room_of(name)) in rooms else "")
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    queue = [start]
    while queue:
        new = graph.get(queue.pop(), set()) - seen
        seen |= new
        queue.extend(new)
    return seen


def upward_imports(package: Path) -> list[str]:
    """`room -> forbidden room` for every import, direct or through others, that runs upward."""
    graph = room_graph(package)
    return sorted(
        f"{room} -> {target}"
        for room in graph.keys() - {"", "__main__"}
        for target in reachable(graph, room) & FORBIDDEN.get(room, HOUSE)
    )


def test_imports_run_downward() -> None:
    assert upward_imports(PACKAGE) == []


def test_weights_and_amortised_stand_side_by_side() -> None:
    graph = room_graph(PACKAGE)
    assert "amortised" not in reachable(graph, "weights")
    assert "weights" in graph


@pytest.mark.parametrize(
    ("room", "line", "found"),
    [
        ("weights/point.py", "from dubito.training import fit", ["weights -> training"]),
        ("weights/point.py", "from ..data import loaders", ["weights -> data"]),
        ("likelihoods.py", "def f():\n    import dubito.plots", ["likelihoods -> plots"]),
        ("moments/linear.py", "from dubito import experiments", ["moments -> experiments"]),
        ("moments/linear.py", "from dubito.objectives import negative_elbo", []),
        ("training.py", "from .report import write", ["training -> report"]),
        ("training.py", "from .data import loaders", []),
        ("mup.py", "import dubito", ["mup -> data"]),
        ("mup.py", "from . import fit_everything", ["mup -> data"]),
        ("priors.py", "import dubito.bayesian", ["bayesian -> cli", "priors -> cli"]),
    ],
)
def test_upward_imports_are_found(tmp_path: Path, room: str, line: str, found: list[str]) -> None:
    package = tmp_path / "dubito"
    for name in ("weights", "moments", "data", "experiments"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    for name in ("training", "plots", "report", "likelihoods", "objectives", "cli", "priors"):
        (package / f"{name}.py").touch()
    (package / "__init__.py").write_text("from dubito import data\n")
    if "bayesian" in line:
        (package / "bayesian.py").write_text("from dubito import cli\n")
    (package / room).write_text(line + "\n")
    assert upward_imports(package) == found


def numpy_uses(path: Path) -> list[int]:
    """Lines that import numpy or leave torch for it."""
    tree = ast.parse(path.read_text())
    lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "numpy"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            lines += [node.lineno for alias in node.names if alias.name.split(".")[0] == "numpy"]
        elif (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").split(".")[0] == "numpy"
        ):
            lines.append(node.lineno)
    return sorted(lines)


def test_no_numpy_where_it_is_hot() -> None:
    files = [path for path in sources("src") if room_of(module_name(path, PACKAGE)) in HOT]
    assert {room_of(module_name(path, PACKAGE)) for path in files} == set(HOT)
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := numpy_uses(path))} == {}


def test_numpy_is_found(tmp_path: Path) -> None:
    path = tmp_path / "hot.py"
    path.write_text(
        "import numpy as np\nfrom numpy.linalg import inv\nimport torch\n\ny = torch.ones(2).numpy()\n"
    )
    assert numpy_uses(path) == [1, 2, 5]


# ----------------------------------------------------------------------------------------------------- README

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def readme_script(text: str) -> str:
    """The ```python blocks of a page as one script, every line at the number it has on the page.

    A block inside an HTML comment runs too, unseen by the reader: that is the place for set-up.

    Raises:
        ValueError: If there is no such block, or one that is indented or never closed, which would not run.
    """
    script = [""] * (text.count("\n") + 1)
    blocks = [m for m in FENCE.finditer(text) if m[1] == "python"]
    opened = len(re.findall(r"^[ \t>]*```[ \t]*python\b", text, re.MULTILINE | re.IGNORECASE))
    if not blocks or len(blocks) != opened:
        raise ValueError(f"{opened} python blocks are opened, {len(blocks)} can be run")
    for block in blocks:
        first = text.count("\n", 0, block.start(2))
        lines = block[2].splitlines()
        script[first : first + len(lines)] = lines
    return "\n".join(script) + "\n"


def test_readme_code_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    if not text.strip():
        pytest.skip("README.md is not written yet")
    script = tmp_path / "readme.py"
    script.write_text(readme_script(text))
    run = python(str(script), cwd=tmp_path)
    assert run.returncode == 0, f"line numbers are README.md's:\n{run.stderr[-3000:]}"


def test_readme_blocks_keep_their_lines_and_order(tmp_path: Path) -> None:
    page = (
        "# Title\n\n```python\nx = 1\n```\ntext\n\n```bash\nfalse\n```\n"
        "<!--\n```python\nx += 1\n```\n-->\n\n```python\nassert x == 2\n1 / 0\n```\n"
    )
    script = tmp_path / "page.py"
    script.write_text(readme_script(page))
    run = python(str(script), cwd=tmp_path)
    assert run.returncode == 1
    assert "ZeroDivisionError" in run.stderr
    assert "line 19," in run.stderr


@pytest.mark.parametrize(
    "page", ["Words only.\n", "- a\n  ```python\n  x = 1\n  ```\n", "```python\nx = 1\n"]
)
def test_a_readme_whose_code_would_not_run_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="python blocks are opened"):
        readme_script(page)
