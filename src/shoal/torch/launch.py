"""Run a script elastically on this machine, without a server. The only module of shoal.torch that uses executors.

python -m shoal.torch.launch --workers 2 --dir run train.py --epochs 3
python -m shoal.torch.launch --dir run --resize 3
python -m shoal.torch.launch --dir run --status
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from shoal.executors.standalone import LocalJob
from shoal.wire import events as ev
from shoal.wire.auth import read_secret
from shoal.wire.channel import Channel
from shoal.wire.messages import Answer, Ask, Kind, Resize, WireError


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m shoal.torch.launch", description="Run a training script elastically on this machine."
    )
    parser.add_argument(
        "--dir", default="shoal-run", help="for checkpoints and logs, and to reach a running job"
    )
    parser.add_argument("--workers", type=int, default=1, help="workers to start with")
    parser.add_argument("--cold", action="store_true", help="start each worker cold, not from a warm process")
    parser.add_argument("--fixed", action="store_true", help="do not replace workers that die")
    parser.add_argument("--replace-stragglers", action="store_true")
    parser.add_argument(
        "--from", dest="begin_from", metavar="FILE", help="start from this checkpoint of an earlier run"
    )
    change = parser.add_argument_group("change a running job (in another terminal, with the same --dir)")
    change.add_argument(
        "--resize", type=int, metavar="N", help="change to N workers; also resumes a paused job"
    )
    change.add_argument("--migrate", action="store_true", help="replace all workers by new ones")
    change.add_argument("--replace", nargs="+", metavar="WORKER", help="replace these workers by new ones")
    for what in ("pause", "checkpoint", "stop", "status"):
        change.add_argument(f"--{what}", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser.parse_args(argv)


def request_of(args: argparse.Namespace) -> Resize | Ask | None:
    if args.resize is not None:
        return Resize(args.resize)
    if args.migrate:
        return Resize(0, fresh=True)
    if args.replace:
        return Resize(0, replace=tuple(args.replace))
    asked = [w for w in ("pause", "checkpoint", "stop", "status") if getattr(args, w)]
    return Ask(asked[0]) if asked else None


def reach(directory: Path) -> Channel:
    """Connect to the job that runs in this directory."""
    address = (directory / "address").read_text().strip()
    return Channel.open(address, read_secret(directory / "secret"), "local", "client")


def is_taken(directory: Path) -> bool:
    with contextlib.suppress(OSError, WireError):
        reach(directory).close()
        return True
    return False


def ask(directory: Path, request: Resize | Ask) -> int:
    try:
        channel = reach(directory)
        channel.send(request)
        answer = channel.receive()
        channel.close()
    except (OSError, WireError) as error:
        why = "none has started there yet" if isinstance(error, FileNotFoundError) else error
        print(f"no job answers in {directory}: {why}", file=sys.stderr)
        return 1
    if not isinstance(answer, Answer) or not answer.ok:
        print(getattr(answer, "text", "no answer"), file=sys.stderr)
        return 1
    print(json.dumps(answer.data) if answer.data else answer.text)
    return 0


def print_event(event: ev.JobEvent) -> None:
    match event:
        case ev.GenerationCommitted(number, members, step, kind):
            workers = "1 worker" if len(members) == 1 else f"{len(members)} workers"
            again = ", from the beginning" if kind is Kind.FIRST and step == 0 and number > 1 else ""
            print(f"generation {number} ({kind}): {workers} after step {step}{again}")
        case ev.WorkerLost(worker, why, _):
            print(f"lost {worker}: {why}")
        case ev.WorkerRefused(worker, why):
            print(f"{worker} cannot join, the job goes on without it: {why.strip().splitlines()[-1]}")
        case ev.JobPaused(path, step):
            print(f"paused after step {step}; resume with --resize N")
        case ev.Checkpointed(path, step):
            print(f"checkpoint of step {step}: {path}")
        case ev.StragglerFound(worker, speed):
            print(f"{worker} is slow: {speed:.2f} of the others' speed")
        case ev.Measured(worker, report):
            for note in report.notes:
                print(f"{worker}: {note}")


def idle_workers(wanted: int, group: int) -> str | None:
    """What to say if the job has workers that no group can use."""
    over = wanted % group
    if not over:
        return None
    return (
        f"{over} of {wanted} workers wait without work: the model is sharded over groups of {group}, so --resize to a "
        f"multiple of {group}"
    )


def run(args: argparse.Namespace) -> int:
    if is_taken(Path(args.dir)):
        raise ValueError(f"a job runs in {args.dir} already: give this one another --dir, or --stop that one")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        job = LocalJob(
            args.script,
            args.workers,
            directory=args.dir,
            warm=not args.cold,
            keep_size=not args.fixed,
            replace_stragglers=args.replace_stragglers,
            begin_from=args.begin_from,
            quiet=False,
        )
    except OSError as error:
        raise ValueError(f"cannot use --dir {args.dir}: {error.strerror}") from None
    if job.executor.why_virtual and Path("/dev/nvidiactl").exists():
        print(f"workers run on the CPU: {job.executor.why_virtual}", file=sys.stderr)
    with job:
        while True:
            with job.changed:
                job.changed.wait_for(lambda: job.events)
                events = [event for _, event in job.events]
                job.events.clear()  # a long run would fill the memory with them
            for event in events:
                print_event(event)
                first = isinstance(event, ev.GenerationCommitted) and event.kind is Kind.FIRST
                if first and (idle := idle_workers(len(job.handle.state.target), job.handle.state.group)):
                    print(idle, file=sys.stderr)
                if isinstance(event, ev.JobFinished):
                    print(
                        f"finished after {event.step} steps" + (f": {event.stopped}" if event.stopped else "")
                    )
                    job.wait_gone()
                    if job.failed_after_end is not None:
                        print(f"failed: its training was done, then {job.failed_after_end}", file=sys.stderr)
                        return 1
                    return 0
                if isinstance(event, ev.JobFailed):
                    # The script's traceback is in its output already.
                    print(f"failed: {event.why.strip().splitlines()[-1]}", file=sys.stderr)
                    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    request = request_of(args)
    try:
        if request is not None:
            return ask(Path(args.dir), request)
        if not args.script:
            print("give a script: python -m shoal.torch.launch --workers 2 train.py", file=sys.stderr)
            return 2
        return run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
