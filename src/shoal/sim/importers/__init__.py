"""Importers of published trace formats: one reader per format, and one conversion for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ShoalError, did_you_mean
from shoal.sim.importers.alibaba_pai import read_alibaba_pai, tables_of
from shoal.sim.importers.convert import Conversion, Wishes, convert
from shoal.sim.importers.elasticflow import elasticflow_profiles, read_elasticflow, speed_files
from shoal.sim.importers.gavel import gavel_profiles, read_gavel
from shoal.sim.importers.helios import read_helios
from shoal.sim.importers.philly_csv import read_philly_csv
from shoal.sim.importers.philly_json import read_philly_json
from shoal.sim.importers.throughputs import Speeds
from shoal.sim.importers.tiresias import read_tiresias
from shoal.sim.importers.trace import Trace

__all__ = ["FORMATS", "Conversion", "Format", "Speeds", "Trace", "Wishes", "convert", "format_named"]


@dataclass(frozen=True)
class Format:
    """A published format: the reader of its jobs and, if it includes speeds, of its profiles."""

    name: str
    about: str
    read: Callable[[str | Path], Trace]
    profiles: Callable[[str | Path], Speeds] | None = None
    #: The files that are read for the path of a trace, and for the path of its throughputs.
    reads: Callable[[Path], Iterable[Path]] = lambda path: (path,)
    reads_speeds: Callable[[Path], Iterable[Path]] = lambda path: (path,)


FORMATS = {
    form.name: form
    for form in (
        Format("philly", "Microsoft Philly, cluster_job_log (JSON)", read_philly_json),
        Format("philly-csv", "Microsoft Philly, flattened to csv", read_philly_csv),
        Format("helios", "SenseTime Helios, cluster_log.csv", read_helios),
        Format("alibaba-pai", "Alibaba PAI 2020, pai_task_table.csv", read_alibaba_pai, reads=tables_of),
        Format("gavel", "Gavel, tab-separated", read_gavel, gavel_profiles),
        Format("tiresias", "Tiresias, csv", read_tiresias),
        Format(
            "elasticflow",
            "ElasticFlow, csv",
            read_elasticflow,
            elasticflow_profiles,
            reads_speeds=speed_files,
        ),
    )
}


def format_named(name: str) -> Format:
    """The format with this name; the error suggests a similar one."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ShoalError(f"unknown trace format {name!r}; {did_you_mean(name, FORMATS)}") from None
