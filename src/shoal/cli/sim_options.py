"""What the commands of `shoal sim` have in common: their inputs, and words about long work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

Jobs = Annotated[Path | None, typer.Argument(help="The trace: jobs.csv or .parquet.", show_default=False)]
Profiles = Annotated[
    Path | None,
    typer.Option(
        "--profiles",
        "-p",
        help="profiles.csv of the trace's models. Default: the one beside the trace, or else the "
        "built-in sample, which `shoal sim gen` uses.",
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", "-g", help="A cluster of so many GPUs, as one pool.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", "-c", help="cluster.yaml: nodes and users.")]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the policy, name=value; `shoal policy show` lists them. name=@FILE takes the "
        "numbers of a file, one per line.",
    ),
]
PlacementWord = Annotated[
    str,
    typer.Option(
        "--placement",
        help="Where shares go: auto, pool, keep-and-pack, node-or-whole-nodes, moving, optimus, liquid, "
        "liquid-batch, or one of your own. Options after colons: moving:horizon_s=600.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same result.")]
CostKind = Annotated[
    str, typer.Option("--costs", help="What a new share costs a job: none, restart, concurrent or suspend.")
]
RestartS = Annotated[
    str | None,
    typer.Option(
        help="Seconds of a restart, with --costs restart: for all models, or 30,resnet50=5. "
        "Default: what is known of the model, or else 30."
    ),
]
PrepareS = Annotated[
    float | None,
    typer.Option("--prepare-s", help="Seconds newcomers prepare, with --costs concurrent. Default: 5."),
]
PauseS = Annotated[
    float | None,
    typer.Option("--pause-s", help="Seconds of standstill, with --costs concurrent. Default: 0.1."),
]
KnowledgeWord = Annotated[
    str,
    typer.Option(
        "--knowledge", help="What the scheduler knows of speeds: true, wrong:ERROR or learned:NOISE."
    ),
]
WholeSeconds = Annotated[
    bool,
    typer.Option("--whole-seconds", help="Round event times up to whole seconds, as AFS' simulator does."),
]
Interpolate = Annotated[
    str, typer.Option("--interpolate", help="Between measured shares, what is linear: time or throughput.")
]
AutoGpus = Annotated[
    bool,
    typer.Option(
        "--auto-gpus", help="Jobs request what is worth it by their profile, not what the trace says."
    ),
]
AutoscaleWord = Annotated[
    str,
    typer.Option(
        "--autoscale",
        help="Search each job's size while it runs: efficiency:threshold=0.5, utility:worth=10,0:at_s=0,3600, "
        "or a heuristic of your own.",
    ),
]
Needs = Annotated[
    Path | None,
    typer.Option("--needs", help="needs.csv: model,gpu_util,gpu_mem_mb[,pre_s][,post_s] of one worker."),
]
Share = Annotated[
    bool, typer.Option("--share", help="Jobs that wait may be guests on GPUs of others; with --needs.")
]
PreSchedule = Annotated[
    bool,
    typer.Option("--pre-schedule", help="The next job prepares where one is about to end; with --needs."),
]
Servers = Annotated[
    str, typer.Option("--servers", help="Parameter servers are beside their workers, or apart from them.")
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Use the trace, profiles and cluster size that come along.")
]


def restart_costs(text: str | None) -> dict[str, Any]:
    """What `--restart-s` says: seconds for all models, seconds of some (MODEL=SECONDS), or both."""
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
    """Several words for one run are meant for a comparison."""
    from shoal.core.errors import ShoalError

    for option, word in given.items():
        if "," in word:
            raise ShoalError(f"{option} {word}: a run takes one; `shoal sim compare` takes several")


def check_costs(
    kinds: Iterable[str], restart_s: str | None, prepare_s: float | None, pause_s: float | None
) -> None:
    """Seconds of a cost model that no run has are a mistake."""
    from shoal.core.errors import ShoalError

    for option, given, kind in (
        ("--restart-s", restart_s, "restart"),
        ("--prepare-s", prepare_s, "concurrent"),
        ("--pause-s", pause_s, "concurrent"),
    ):
        if given is not None and kind not in kinds:
            raise ShoalError(f"{option} says nothing without --costs {kind}")


def check_models(named: Iterable[str], profiles: Path) -> None:
    """Every model named by an option is one of the profiles."""
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


def files_read(setup: Any, option: list[str] | None) -> list[Path | None]:
    """The files that a run reads, which nothing it writes may replace."""
    numbers = [Path(word.partition("=@")[2]) for word in option or [] if "=@" in word]
    return [setup.jobs, setup.profiles, setup.cluster, setup.needs, *numbers]


def setup(
    policy: str,
    jobs: Path | None,
    profiles: Path | None,
    gpus: int | None,
    cluster: Path | None,
    sample: bool,
    **rest: Any,
) -> Any:
    """A `Setup` from the words of the command line."""
    from shoal.core.errors import ShoalError
    from shoal.placement.registry import parse_placement
    from shoal.sim.costs import Costs
    from shoal.sim.known_profiles import Knowledge
    from shoal.sim.runner import Setup
    from shoal.sim.samples import sample_path

    if sample:
        if jobs is not None:
            raise ShoalError(f"--sample is a trace of its own; leave it out, or {jobs}")
        jobs = sample_path("jobs.csv")
        if gpus is None and cluster is None:
            gpus = 64
    if jobs is None:
        raise ShoalError("name a trace (jobs.csv), or try the one that comes along with --sample")
    if profiles is None:
        beside = jobs.parent / "profiles.csv"
        profiles = beside if beside.exists() and not sample else sample_path("profiles.csv")
    interpolation = rest.pop("interpolate")
    if interpolation not in ("time", "throughput"):
        raise ShoalError(f"--interpolate {interpolation}: say time or throughput")
    restarts = restart_costs(rest.pop("restart_s"))
    check_models(restarts.get("restart_by_model", ()), profiles)
    seconds = {name: rest.pop(name) for name in ("prepare_s", "pause_s")}
    costs = Costs(rest.pop("costs"), **restarts, **{name: s for name, s in seconds.items() if s is not None})
    options = parse_options(rest.pop("option") or [])
    servers = rest.pop("servers")
    if servers not in ("beside", "apart"):
        raise ShoalError(f"--servers {servers}: say beside or apart")
    parse_placement(rest["placement"])  # a mistake in it is told before anything is read
    if rest["autoscale"]:
        from shoal.knowledge.size_search import Autoscale

        Autoscale.parse(rest["autoscale"])
    return Setup(
        jobs=jobs,
        profiles=profiles,
        policy=policy,
        gpus=gpus,
        cluster=cluster,
        options=options,
        costs=costs,
        knowledge=Knowledge.parse(rest.pop("knowledge")),
        interpolation=interpolation,
        servers_apart=servers == "apart",
        **rest,
    )


def parse_options(words: list[str]) -> dict[str, str]:
    """`name=value` words; a value `@file` stands for the numbers in a file, one per line."""
    from shoal.core.errors import ShoalError
    from shoal.sim.inputs.numbers_file import read_numbers

    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ShoalError(f"--option {word}: write name=value")
        if name in options:
            raise ShoalError(f"--option {word}: {name} is given twice; say it once")
        if value.startswith("@"):
            value = ",".join(map(str, read_numbers(Path(value[1:]))))
        options[name] = value
    return options


def check_output(output: str) -> None:
    from shoal.core.errors import ShoalError

    if output not in ("table", "json"):
        raise ShoalError(f"-o {output}: say table or json")
