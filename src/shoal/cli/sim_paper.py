"""`shoal sim paper NAME`: run the experiments of a paper; print our figures next to the paper's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from shoal.cli import sim_options as so
from shoal.cli.extras import require
from shoal.cli.report import reported

#: Papers by name, and the module with their `run`, `render` and `plot`.
PAPERS = {
    "afs": "shoal.sim.papers.afs",
    "elasticity": "shoal.sim.papers.elasticity",
    "gandiva-fair": "shoal.sim.papers.gandiva_fair",
    "liquid": "shoal.sim.papers.liquid",
    "optimus": "shoal.sim.papers.optimus",
}


@click.command()
@click.argument("name", metavar="NAME", help=f"The paper: {', '.join(PAPERS)}.")
@so.seed_option
@click.option("--quick", is_flag=True, help="Run a smaller experiment, in seconds.")
@click.option("--plot", type=so.FILE, help="Draw the figures here (.png, .svg or .pdf).")
@so.output_option
@reported
def paper(name: str, seed: int, quick: bool, plot: Path | None, output: str) -> None:
    """Run the experiments of a paper and print our figures next to the paper's.

    \b
    Examples:
      shoal sim paper afs
      shoal sim paper afs --quick --plot afs.png
      shoal sim paper gandiva-fair -o json
    """
    require("shoal sim paper", "sim")
    module = module_of(name)
    if plot:
        check_plot(plot)
    from shoal.cli.out import print_json, room, say
    from shoal.cli.sim_progress import FIRST_USE
    from shoal.sim.compiling import compiling

    with compiling(lambda: say(FIRST_USE)):
        result = module.run(seed=seed, quick=quick)
    if plot:
        draw(module, result, plot)
        say(f"plot: {plot}")
    if output == "json":
        print_json(result)
    else:
        print("\n".join(part for line in module.render(result).splitlines() for part in fitted(line, room())))


def fitted(line: str, width: int | None) -> list[str]:
    """Break a line to fit the width. A row of a table breaks after a whole cell, the same one in every row."""
    import re
    import textwrap

    if width is None or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    cells = [found.end() for found in re.finditer(r"\S(?=\s{2})", line) if found.end() <= width]
    if not cells:
        return textwrap.wrap(line, width, subsequent_indent=indent)
    return [line[: cells[-1]], *fitted("    " + line[cells[-1] :], width)]


def module_of(name: str) -> Any:
    """The module of a paper's experiments."""
    from shoal.core.errors import ShoalError, did_you_mean

    if name not in PAPERS:
        raise ShoalError(f"there is no paper {name!r}; {did_you_mean(name, PAPERS)}")
    try:
        return import_module(PAPERS[name])
    except ModuleNotFoundError as error:
        if error.name != PAPERS[name]:
            raise
        raise ShoalError(f"the experiments of {name!r} do not come with this version of Shoal") from None


def draw(module: Any, result: dict[str, Any], path: Path) -> None:
    """Draw into a temporary file of the same type, then write the file completely or not at all."""
    import tempfile

    from shoal.sim.inputs import write_aside

    with tempfile.TemporaryDirectory() as folder, write_aside(path) as aside:
        drawn = Path(folder) / f"plot{path.suffix.lower()}"
        module.plot(result, drawn)
        aside.write_bytes(drawn.read_bytes())


def check_plot(path: Path) -> None:
    """Check before the experiment that its plot can be written."""
    from shoal.core.errors import ShoalError

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ShoalError(f"--plot {path}: give a name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ShoalError(f"--plot {path}: there is no directory {path.parent}")
