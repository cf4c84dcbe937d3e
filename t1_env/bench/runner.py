"""Chooses benchmarks, runs them and collects the report."""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

from t1_env.bench import facts, fleet, local, peers, remote, turns, verify
from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import evaluate
from t1_env.bench.measure import Measured, Tick, extend
from t1_env.bench.report import Failure, Report
from t1_env.errors import ConfigError, SandboxUnavailable, T1Error
from t1_env.sandbox.local import unavailable_reason
from t1_env.tasks import load_task

SANDBOXES: Final = ("local", "docker", "ssh")
QUICK_FRACTION: Final = 0.1


class Watcher(Protocol):
    """Is told how a run goes."""

    def begin(self, benchmark: Benchmark, number: int, total: int) -> Tick:
        """A benchmark begins, the ``number``-th of ``total``; returns who is told its progress."""

    def end(self, benchmark: Benchmark, seconds: float, failure: Failure | None) -> None:
        """It ended."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to run.

    Args:
        sandboxes: Backends, of ``SANDBOXES``.
        only: Names of benchmarks or globs over them; empty for all.
        peers: Whether SWE-ReX is measured too.
        ssh_loopback: Whether the ssh backend talks to a throw-away server on this machine instead of the configured host.
        repeat: How often everything is run; samples are pooled.
        settings: How large.
    """

    sandboxes: tuple[str, ...] = ("local",)
    only: tuple[str, ...] = ()
    peers: bool = False
    ssh_loopback: bool = False
    repeat: int = 1
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for name in self.sandboxes:
            if name not in SANDBOXES:
                raise ConfigError(f"no benchmarks for sandbox {name!r}: expected one of {', '.join(SANDBOXES)}")
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat}: expected at least 1")


def choose(benchmarks: Sequence[Benchmark], only: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks that match a name or glob, in their own order.

    Args:
        benchmarks: To choose from.
        only: Names and globs; empty for all.

    Returns:
        At least one benchmark.

    Raises:
        ConfigError: If one of the names matches nothing.
    """
    if not only:
        return list(benchmarks)
    names = [benchmark.name for benchmark in benchmarks]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
            raise ConfigError(f"no benchmark is called {pattern!r} with these sandboxes and peers: {hint}")
    return [benchmark for benchmark in benchmarks if any(fnmatch.fnmatchcase(benchmark.name, pattern) for pattern in only)]


def run(options: BenchOptions, watcher: Watcher) -> Report:
    """Run benchmarks.

    A benchmark that fails is reported as a failure and the others go on. What is missing before anything was measured (a backend, a
    package, a benchmark of that name) is raised.

    Args:
        options: What to run.
        watcher: Is told how it goes.

    Returns:
        The report.

    Raises:
        ConfigError: Nothing has such a name.
        DependencyMissing: A package is needed.
        SandboxUnavailable: This machine cannot run one of the sandboxes.
        TaskError: The task is not known or malformed.
    """
    chosen = choose(collect(options), options.only)
    _require(options, chosen)
    started = time.monotonic()
    report = Report(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        options=asdict(options),
        machine=facts.machine_facts(),
        versions=facts.versions(),
        load_before=facts.load_average(),
    )
    failed: dict[str, Failure] = {}
    total = len(chosen) * options.repeat
    for number in range(total):
        benchmark = chosen[number % len(chosen)]
        if benchmark.name in failed:
            continue
        began = time.monotonic()
        failure = _run_one(benchmark, report.measured, watcher.begin(benchmark, number + 1, total))
        if failure is not None:
            failed[benchmark.name] = failure
            del report.measured[benchmark.name]
        watcher.end(benchmark, time.monotonic() - began, failure)
    report.failures = list(failed.values())
    for benchmark in chosen:
        if benchmark.name in report.measured:
            report.figures += [evaluate(spec, benchmark.name, report.measured[benchmark.name]) for spec in benchmark.figures]
    report.load_after, report.seconds = facts.load_average(), time.monotonic() - started
    return report


def collect(options: BenchOptions) -> list[Benchmark]:
    """Return all benchmarks of the chosen sandboxes and peers; nothing is started.

    Args:
        options: What to run.
    """
    found: list[Benchmark] = []
    if "local" in options.sandboxes:
        for module in (local, verify, turns, fleet):
            found += module.benchmarks(options.settings)
    if "docker" in options.sandboxes:
        found += remote.benchmarks(remote.docker_place(options.settings), options.settings)
        found += verify.docker_benchmarks(options.settings)
    if "ssh" in options.sandboxes:
        found += remote.benchmarks(remote.ssh_place(loopback=options.ssh_loopback), options.settings)
    if options.peers:
        found += peers.benchmarks(options.settings)
    return found


def _require(options: BenchOptions, chosen: Sequence[Benchmark]) -> None:
    """Raise what is missing for the chosen benchmarks before anything is measured."""
    needed = {benchmark.name.partition("-")[0] for benchmark in chosen}
    if "peer" in needed:
        peers.require_peers()
    if needed & {"local", "peer"}:
        reason = unavailable_reason()
        if reason is not None:
            raise SandboxUnavailable(reason)
        load_task(options.settings.task)
    if "docker" in needed:
        remote.probe(remote.docker_place(options.settings))
    if "ssh" in needed:
        remote.probe(remote.ssh_place(loopback=options.ssh_loopback))


def _run_one(benchmark: Benchmark, measured: dict[str, Measured], tick: Tick) -> Failure | None:
    try:
        extend(measured.setdefault(benchmark.name, {}), benchmark.run(tick))
    except (T1Error, OSError) as error:
        return Failure(benchmark.name, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return None
