"""Options that the commands of `shoal sim` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from shoal.core.profile import Interpolation
    from shoal.sim.costs import Costs
    from shoal.sim.runner import Setup

FILE = click.Path(path_type=Path)

seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="The same seed gives the same result."
)
output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Output format."
)


@dataclass(frozen=True, slots=True)
class Given:
    """The options that `shoal sim run` and `shoal sim compare` have in common; see `COMMON`."""

    jobs: Path | None
    profiles: Path | None
    gpus: int | None
    cluster: Path | None
    option: tuple[str, ...]
    seed: int
    restart_s: str | None
    prepare_s: float | None
    pause_s: float | None
    whole_seconds: bool
    interpolate: Interpolation
    auto_gpus: bool
    needs: Path | None
    share: bool
    pre_schedule: bool
    servers: str
    sample: bool


COMMON = (
    click.argument(
        "jobs", type=FILE, required=False, metavar="[JOBS]", help="The trace: jobs.csv or .parquet."
    ),
    click.option(
        "-p",
        "--profiles",
        type=FILE,
        help="profiles.csv of the trace's models. Default: profiles.csv in the directory of the trace, "
        "or else the built-in sample, which `shoal sim gen` uses.",
    ),
    click.option("-g", "--gpus", type=int, help="Simulate one pool of this many GPUs."),
    click.option("-c", "--cluster", type=FILE, help="cluster.yaml: nodes and users."),
    click.option(
        "--option",
        multiple=True,
        help="An option of the policy, name=value; `shoal policy show` lists them. name=@FILE reads the "
        "numbers from a file, one per line.",
    ),
    seed_option,
    click.option(
        "--restart-s",
        help="Seconds of a restart, with --costs restart: for all models, or 30,resnet50=5. "
        "Default: the model's own restart time if it is known, or else 30.",
    ),
    click.option(
        "--prepare-s",
        type=float,
        help="Seconds that new workers prepare, with --costs concurrent. Default: 5.",
    ),
    click.option(
        "--pause-s", type=float, help="Seconds that training pauses, with --costs concurrent. Default: 0.1."
    ),
    click.option(
        "--whole-seconds",
        is_flag=True,
        help="Round event times up to whole seconds, as the simulator of the AFS paper does.",
    ),
    click.option(
        "--interpolate",
        type=click.Choice(["time", "throughput"]),
        default="time",
        help="Quantity that is linear between measured shares.",
    ),
    click.option(
        "--auto-gpus",
        is_flag=True,
        help="Jobs request the number of GPUs that their profile makes worthwhile, not that of the trace.",
    ),
    click.option(
        "--needs", type=FILE, help="needs.csv: model,gpu_util,gpu_mem_mb[,pre_s][,post_s] of one worker."
    ),
    click.option(
        "--share", is_flag=True, help="Waiting jobs may be co-located on GPUs of other jobs; with --needs."
    ),
    click.option(
        "--pre-schedule",
        is_flag=True,
        help="The next job prepares on a GPU whose job is about to end; with --needs.",
    ),
    click.option(
        "--servers",
        type=click.Choice(["beside", "apart"]),
        default="beside",
        help="Parameter servers run beside their workers, or apart from them.",
    ),
    click.option(
        "--sample", is_flag=True, help="Use the built-in trace, with its profiles and cluster size."
    ),
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `COMMON`, which the command receives as `given`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = Given(**{field.name: values.pop(field.name) for field in fields(Given)})
        command(given=given, **values)

    for option in reversed(COMMON):
        run = option(run)
    return run


def restart_costs(text: str | None) -> dict[str, Any]:
    """Parse `--restart-s`: seconds for all models, for some (MODEL=SECONDS), or both."""
    from shoal.core.errors import ShoalError

    if text is None:
        return {}
    known: dict[str, Any] = {"restart_by_model": {}}
    for part in text.split(","):
        model, _, seconds = part.rpartition("=")
        if model in known["restart_by_model"] or (not model and "restart_s" in known):
            raise ShoalError(f"--restart-s {text}: {f'{model!r} is' if model else 'seconds are'} given twice")
        try:
            value = float(seconds)
        except ValueError:
            raise ShoalError(f"--restart-s {text}: {part!r} is not SECONDS or MODEL=SECONDS") from None
        if model:
            known["restart_by_model"][model] = value
        else:
            known["restart_s"] = value
    return known


def check_one_each(given: Mapping[str, str]) -> None:
    """Refuse comma-separated values, which only a comparison takes."""
    from shoal.core.errors import ShoalError

    for option, word in given.items():
        if "," in word:
            raise ShoalError(f"{option} {word}: a run takes one; `shoal sim compare` takes several")


def check_costs(kinds: Iterable[str], given: Given) -> None:
    """Refuse seconds of a cost model that no run has."""
    from shoal.core.errors import ShoalError

    for option, seconds, kind in (
        ("--restart-s", given.restart_s, "restart"),
        ("--prepare-s", given.prepare_s, "concurrent"),
        ("--pause-s", given.pause_s, "concurrent"),
    ):
        if seconds is not None and kind not in kinds:
            raise ShoalError(f"{option} has no effect without --costs {kind}")


def check_models(named: Iterable[str], profiles: Path) -> None:
    """Check that every model named by an option has a profile."""
    from shoal.core.errors import ShoalError, did_you_mean
    from shoal.sim.inputs import read_profiles

    if not named:
        return
    known = read_profiles(profiles)
    for model in named:
        if model not in known:
            raise ShoalError(
                f"--restart-s: no profile in {profiles} is of model {model!r}; {did_you_mean(model, known)}"
            )


def files_read(setup: Setup, option: Sequence[str]) -> list[Path | None]:
    """The files that a run reads; nothing that it writes may replace them."""
    numbers = [Path(word.partition("=@")[2]) for word in option if "=@" in word]
    return [setup.jobs, setup.profiles, setup.cluster, setup.needs, *numbers]


def make_setup(
    given: Given, *, policy: str, costs: str, knowledge: str, placement: str, autoscale: str
) -> Setup:
    """The `Setup` of one run. Mistakes in the options are found before any file is read."""
    from shoal.placement.registry import parse_placement
    from shoal.sim.known_profiles import Knowledge
    from shoal.sim.runner import Setup

    jobs, gpus = _trace(given)
    profiles = _profiles(given, jobs)
    made = Setup(
        jobs=jobs,
        profiles=profiles,
        policy=policy,
        gpus=gpus,
        cluster=given.cluster,
        options=parse_options(given.option),
        seed=given.seed,
        costs=_costs(given, costs, profiles),
        knowledge=Knowledge.parse(knowledge),
        placement=placement,
        whole_seconds=given.whole_seconds,
        interpolation=given.interpolate,
        auto_gpus=given.auto_gpus,
        autoscale=autoscale,
        needs=given.needs,
        share=given.share,
        pre_schedule=given.pre_schedule,
        servers_apart=given.servers == "apart",
    )
    parse_placement(placement)
    if autoscale:
        from shoal.knowledge.size_search import Autoscale

        Autoscale.parse(autoscale)
    return made


def _trace(given: Given) -> tuple[Path, int | None]:
    """The trace, and the number of GPUs of its cluster if that is one pool."""
    from shoal.core.errors import ShoalError
    from shoal.sim.samples import sample_path

    if not given.sample:
        if given.jobs is None:
            raise ShoalError("name a trace (jobs.csv), or use the built-in one: --sample")
        return given.jobs, given.gpus
    if given.jobs is not None:
        raise ShoalError(f"--sample names a trace, and so does {given.jobs}; leave one out")
    return sample_path("jobs.csv"), 64 if given.gpus is None and given.cluster is None else given.gpus


def _profiles(given: Given, jobs: Path) -> Path:
    from shoal.sim.samples import sample_path

    if given.profiles is not None:
        return given.profiles
    beside = jobs.parent / "profiles.csv"
    return beside if beside.exists() and not given.sample else sample_path("profiles.csv")


def _costs(given: Given, kind: str, profiles: Path) -> Costs:
    from shoal.sim.costs import Costs

    restarts = restart_costs(given.restart_s)
    check_models(restarts.get("restart_by_model", ()), profiles)
    seconds = {"prepare_s": given.prepare_s, "pause_s": given.pause_s}
    known: dict[str, Any] = {**restarts, **{name: s for name, s in seconds.items() if s is not None}}
    return Costs(cast(Any, kind), **known)  # it checks the kind itself


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Parse `name=value`; a value `@file` stands for the numbers in a file, one per line."""
    from shoal.core.errors import ShoalError
    from shoal.sim.inputs.numbers_file import read_numbers

    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ShoalError(f"--option {word}: write name=value")
        if name in options:
            raise ShoalError(f"--option {word}: {name} is given twice")
        if value.startswith("@"):
            value = ",".join(map(str, read_numbers(Path(value[1:]))))
        options[name] = value
    return options
