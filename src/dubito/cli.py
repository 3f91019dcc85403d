"""The command line: ``dubito compare`` and ``dubito reproduce``.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the data are not there
or the training failed, 2 a wrong argument, 130 interrupted (what was finished is kept).
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

if TYPE_CHECKING:
    from rich.console import Console
    from typer import Typer

    from dubito.experiments.compare import Comparison
    from dubito.report import Table

RESULTS = "results.json"
_PIPED_WIDTH = 100  # columns of the table where no terminal says how wide it is


def main() -> None:
    """Entry point of the ``dubito`` command."""
    try:
        _app()(prog_name="dubito")
    except KeyboardInterrupt:  # before or after the training, where there is nothing to keep
        sys.exit(130)


def _app() -> "Typer":
    import typer

    from dubito.experiments.reproduce_command import add_reproduce

    app = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )

    @app.callback()
    def top(
        version: Annotated[
            bool,
            typer.Option("--version", is_eager=True, callback=_version, help="Print the version and stop."),
        ] = False,
    ) -> None:
        """Bayesian deep learning in PyTorch: any module, called with random weights."""

    @app.command(name="compare", help=_compare_help())
    def compare_command(
        data: Annotated[str, typer.Option(help="Data set.")] = "mnist-5k",
        methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "all",
        epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 15,
        seeds: Annotated[int, typer.Option(min=1, help="How many times to repeat everything.")] = 1,
        output: Annotated[
            Path, typer.Option(help="Folder of report.html, results.json and two pictures.")
        ] = Path("runs/compare"),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
        threads: Annotated[int, typer.Option(min=1, help="CPU threads; small networks want one.")] = 1,
    ) -> None:
        _compare(data, methods, epochs, seeds, output, as_json, threads)

    add_reproduce(app, print_table)
    return app


def _version(asked: bool) -> None:
    if asked:
        from dubito import __version__

        print(f"dubito {__version__}")
        sys.exit(0)


def _compare_help() -> str:
    from dubito.data import DATASETS
    from dubito.experiments.methods import METHODS

    sets = "\n".join(f"  {name}: {entry.summary}" for name, entry in DATASETS.items())
    ways = "\n".join(f"  {name}: {method.summary}" for name, method in METHODS.items())
    return (
        "Train one network a method on real images, print one table, write a report with pictures.\n\n"
        f"\b\nData sets:\n{sets}\n\n\b\nMethods:\n{ways}"
    )


def _compare(
    data: str, methods: str, epochs: int, seeds: int, output: Path, as_json: bool, threads: int
) -> None:
    """Check everything first, train, and tell; whatever is finished is told even where not all is."""
    import torch
    from rich.console import Console

    from dubito.data import check_dataset_name
    from dubito.experiments.methods import METHODS, check_method_names
    from dubito.report import check_report_folder

    console = Console(stderr=True, highlight=False)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    try:
        check_dataset_name(data)
        chosen = check_method_names(list(METHODS) if names == ["all"] else names)
        folder = check_report_folder(output)
    except (ValueError, OSError) as error:
        _fail(console, error, 2)
    torch.set_num_threads(threads)
    session = _Session(console, folder)
    code = session.train(data, chosen, epochs, seeds)
    session.tell(as_json)
    sys.exit(code)


class _Session:
    """One comparison in the making: what is finished is on the disk, and told at the end however it ends."""

    def __init__(self, console: "Console", folder: Path) -> None:
        self.console = console
        self.folder = folder
        self.comparison: Comparison | None = None

    def train(self, data: str, methods: tuple[str, ...], epochs: int, seeds: int) -> int:
        """Train everything; returns the exit code."""
        from dubito.experiments.compare import compare
        from dubito.training import NonFiniteError

        try:
            self.console.print(f"loading {data}")
            compare(data, methods, epochs, seeds, progress=True, on_start=self.announce, on_run=self.keep)
        except KeyboardInterrupt:
            self.console.print("interrupted")
            return 130
        except (ImportError, FileNotFoundError, NonFiniteError) as error:
            self.console.print(f"error: {error}", style="red", markup=False)
            return 1
        return 0

    def announce(self, comparison: "Comparison", method: str, seed: int) -> None:
        """Say what is being trained."""
        planned = len(comparison.methods) * len(comparison.seeds)
        again = f", seed {seed}" if len(comparison.seeds) > 1 else ""
        self.console.print(f"{len(comparison.runs) + 1}/{planned} {method}{again}")

    def keep(self, comparison: "Comparison") -> None:
        """Put what is finished on the disk, and say how the last run went."""
        from dubito.report import write_whole

        self.comparison = comparison
        write_whole(self.folder / RESULTS, json.dumps(comparison.as_dict(), indent=1) + "\n")
        last = comparison.runs[-1].metrics
        self.console.print(
            f"    accuracy {100 * last['accuracy']:.1f} %, NLL {last['nll']:.3f}, "
            f"trained in {last['train_seconds']:.1f} s"
        )
        for warning in comparison.runs[-1].warnings:
            self.console.print(f"    warning: {warning}", style="yellow", markup=False)

    def tell(self, as_json: bool) -> None:
        """Print the table (or JSON) of what is finished and write the report."""
        from dubito.experiments.compare_report import pictures, report, table
        from dubito.plots import save_png
        from dubito.report import write_report

        if self.comparison is None:
            self.console.print("no run was finished: nothing to report")
            return
        if as_json:
            print(json.dumps(self.comparison.as_dict(), indent=1))
        else:
            print_table(table(self.comparison))
        path = write_report(report(self.comparison), self.folder)
        for name, figure in pictures(self.comparison).items():
            save_png(figure, self.folder / name)
        if not self.comparison.complete:
            self.console.print("not all runs were finished; what was is kept:")
        self.console.print(f"{path}\n{self.folder / RESULTS}", soft_wrap=True, markup=False)


def print_table(table: "Table") -> None:
    """Print a table to standard output, as wide as the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(title=table.caption, box=box.SIMPLE, title_justify="left")
    grid.add_column("")
    for i, name in enumerate(table.columns):
        grid.add_column(name, justify="right", min_width=max(len(row.cells[i]) for row in table.rows))
    for row in table.rows:
        grid.add_row(row.label, *row.cells)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)
    console.print(grid)


def _fail(console: "Console", error: Exception, code: int) -> NoReturn:
    console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    sys.exit(code)
