"""``t1-env bench``: measure T1 on this machine."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.measure import Tick
from t1_env.bench.report import Failure, Report
from t1_env.bench.runner import QUICK_FRACTION, BenchOptions, choose, collect, run
from t1_env.errors import ConfigError

EXIT_OK, EXIT_FAILED = 0, 1
_FILE_WIDTH = 160


def bench_command(arguments: argparse.Namespace) -> int:
    """Run benchmarks, print the table, write what was asked for.

    Args:
        arguments: As parsed by ``t1_env.cli.main``.

    Returns:
        0; 1 if a benchmark failed, or with ``--strict`` if a target was missed.

    Raises:
        ConfigError: Something that was asked for does not exist or cannot be written.
    """
    options = _options(arguments)
    if arguments.list:
        return _list(options)
    json_file = _writable(arguments.json)
    out_dir = _directory(arguments.out)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    watcher = _Watcher(Console(stderr=True, highlight=False))
    with watcher.progress:
        report = run(options, watcher)
    console.print(report.headline(), markup=False)
    console.print(report.table())
    _say(console, report)
    if json_file is not None:
        _write(json_file, report.to_json(), console)
    if out_dir is not None:
        stem = "bench-" + datetime.fromisoformat(report.started_at).strftime("%Y%m%dT%H%M%SZ")
        _write(out_dir / f"{stem}.json", report.to_json(), console)
        _write(out_dir / f"{stem}.md", report.to_markdown(), console)
    return EXIT_FAILED if report.failures or (arguments.strict and report.missed) else EXIT_OK


def _options(arguments: argparse.Namespace) -> BenchOptions:
    if arguments.conformance and arguments.group != "verify":
        raise ConfigError("--conformance is part of the group verify: call t1-env bench verify --conformance")
    settings = Settings(
        fraction=QUICK_FRACTION if arguments.quick else 1.0,
        fleet_size=arguments.fleet,
        task=arguments.task,
        docker_image=arguments.docker_image,
        conformance=arguments.conformance,
    )
    return BenchOptions(
        sandboxes=tuple(dict.fromkeys(arguments.sandbox or ["local"])),
        only=tuple(arguments.only or (("*-verify*",) if arguments.group == "verify" else ())),
        peers=arguments.peers,
        ssh_loopback=arguments.ssh_loopback,
        repeat=arguments.repeat,
        settings=settings,
    )


def _list(options: BenchOptions) -> int:
    """Print every figure that would be measured with its definition."""
    for benchmark in choose(collect(options), options.only):
        print(f"{benchmark.name}: {benchmark.title}")
        for figure in benchmark.figures:
            print(f"  {figure.name}: {figure.definition}")
    return EXIT_OK


class _Watcher:
    """Shows progress on stderr: a bar on a terminal, one line for each benchmark elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._console = console
        self._bar: TaskID | None = None

    def begin(self, benchmark: Benchmark, number: int, total: int) -> Tick:
        """See ``Watcher``."""
        said = f"[{number}/{total}] {benchmark.name}: {benchmark.title}"
        bar = self._bar = self.progress.add_task(said, total=1.0)
        if not self._console.is_terminal:
            self._console.print(said, markup=False, soft_wrap=True)

        def tick(done: float) -> None:
            self.progress.update(bar, completed=done)

        return tick

    def end(self, benchmark: Benchmark, seconds: float, failure: Failure | None) -> None:
        """See ``Watcher``."""
        if self._bar is not None:
            self.progress.remove_task(self._bar)
        if failure is not None:
            self._console.print(f"{benchmark.name} failed after {seconds:.1f} s: {failure.reason}", markup=False, soft_wrap=True)


def _say(console: Console, report: Report) -> None:
    bounded = [figure for figure in report.figures if figure.met is not None]
    console.print(f"{len(bounded) - len(report.missed)} of {len(bounded)} targets met in {report.seconds:.0f} s", markup=False)
    cpus = report.machine["cpus"]
    if report.load_before[0] > cpus / 2:
        print(
            f"t1-env: warning: the load average was {report.load_before[0]:.1f} on {cpus} CPUs before the run: trust the ratios only",
            file=sys.stderr,
        )


def _writable(name: str | None) -> Path | None:
    """Check before minutes of measuring that a file can be written after them."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"--json {name!r}: expected the name of a file in a directory that exists")
    return path


def _directory(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {name!r}: not a directory and cannot be made one ({error.strerror})") from error
    return path


def _write(path: Path, text: str, console: Console) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    console.print(f"wrote {path}", markup=False, soft_wrap=True)
