"""What one sandbox of any backend costs: reset, commands, large output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from t1_env.bench import floors
from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import FigureSpec, Target, percentile
from t1_env.bench.measure import Contender, Measured, MeasurementError, Role, Series, Tick, interleave, timed
from t1_env.sandbox.base import Sandbox
from t1_env.shell import Session, ShellConfig, ShellResult

_LINE: Final = "0123456789" * 7 + "01234567"
_TIMEOUT_S: Final = 600.0


Opener = Callable[[Sandbox], contextlib.AbstractContextManager[Callable[[], object]]]
"""Opens, in a started sandbox, another way to run ``true`` there; gives what runs it once."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place that is ready.

    Args:
        make: Returns a sandbox that is not started.
        peers: Name -> another way to run commands in the same place, measured in turn.
    """

    make: Callable[[], Sandbox]
    peers: Mapping[str, Opener] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where shells run.

    Args:
        name: Of the backend.
        open: Makes the place ready for a benchmark, for example by starting a server.
        rounds: Blocks of small commands.
        targets: Name of a figure, without the backend's -> target.
        peers: Names of the peers of its site.
    """

    name: str
    open: Callable[[], contextlib.AbstractContextManager[Site]]
    rounds: int
    targets: Mapping[str, Target] = field(default_factory=dict)
    peers: tuple[str, ...] = ()


@contextlib.contextmanager
def open_shell(sandbox: Sandbox) -> Iterator[Session]:
    """Start a sandbox and a shell in it; both are gone afterwards."""
    try:
        sandbox.start()
        with Session(sandbox, ShellConfig(timeout_s=_TIMEOUT_S)) as session:
            yield session
    finally:
        sandbox.close()


def run_checked(session: Session, command: str) -> ShellResult:
    """Run a command that must succeed.

    Raises:
        MeasurementError: If it did not.
    """
    result = session.run(command)
    if result.exit_code != 0:
        raise MeasurementError(
            f"{command!r} ended with status {result.exit_code} in state {result.state.value!r}; it printed {result.output[-200:]!r}"
        )
    return result


def output_command(size_bytes: int) -> str:
    """Return a command that prints this many bytes in lines of 79 bytes."""
    return f"yes {_LINE} | head -c {size_bytes}"


def first_command(make: Callable[[], Sandbox], reset: Series, close: Series) -> Contender:
    """Return a contender that makes a sandbox, has its shell answer ``true``, and closes both."""

    def take() -> tuple[float, float]:
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            run_checked(stack.enter_context(open_shell(make())), "true")
            answered = time.perf_counter()
        return answered - start, time.perf_counter() - answered

    return Contender((reset, close), take)


def true_benchmark(place: Place, settings: Settings) -> Benchmark:
    """Return the benchmark of small commands in one shell."""
    name = f"{place.name}-true"
    with_floors = place.name == "local"
    floor_names = ("raw pty", "fork+exec", "bash -c") if with_floors else ()

    def run(tick: Tick) -> Measured:
        measured = {
            "true": Series(Role.OURS),
            "/bin/true": Series(Role.OURS),
            **{floor: Series(Role.FLOOR) for floor in floor_names},
            **{peer: Series(Role.PEER) for peer in place.peers},
        }
        with contextlib.ExitStack() as stack:
            site = stack.enter_context(place.open())
            sandbox = site.make()
            session = stack.enter_context(open_shell(sandbox))
            contenders = [
                timed(measured["true"], lambda: run_checked(session, "true"), 40),
                timed(measured["/bin/true"], lambda: run_checked(session, "/bin/true"), 20),
            ]
            if with_floors:
                master = stack.enter_context(floors.raw_pty())
                contenders += [
                    timed(measured["raw pty"], lambda: floors.pty_round_trip(master), 40),
                    timed(measured["fork+exec"], floors.subprocess_true, 10),
                    timed(measured["bash -c"], floors.bash_true, 5),
                ]
            for peer in place.peers:
                contenders.append(timed(measured[peer], stack.enter_context(site.peers[peer](sandbox))))
            interleave(contenders, settings.count(place.rounds), tick, warmup=3)
        return measured

    told = f"in one shell of the {place.name} sandbox, wall time of `Session.run`"
    return Benchmark(
        name,
        "small commands in one shell",
        (
            _spec(place, "true-p50", "`true`, p50", f"The builtin `true` {told}; median.", "true", 50, (*floor_names[:1], *place.peers)),
            _spec(place, "true-p99", "`true`, p99", f"The builtin `true` {told}; 99th percentile.", "true", 99),
            _spec(
                place,
                "bin-true-p50",
                "`/bin/true`, p50",
                f"`/bin/true`, a fork and an exec, {told}; median.",
                "/bin/true",
                50,
                floor_names[1:],
            ),
            _spec(place, "bin-true-p99", "`/bin/true`, p99", f"`/bin/true` {told}; 99th percentile.", "/bin/true", 99),
        ),
        run,
    )


def output_benchmark(place: Place, settings: Settings) -> Benchmark:
    """Return the benchmark of a command that prints much."""
    size = settings.output_bytes
    command = output_command(size)
    floor_names = ("pipe", "raw pty") if place.name == "local" else ()

    def run(tick: Tick) -> Measured:
        measured = {"output": Series(Role.OURS), **{floor: Series(Role.FLOOR) for floor in floor_names}}
        with place.open() as site, open_shell(site.make()) as session:

            def ours() -> None:
                printed = run_checked(session, command).output_bytes
                if printed != size:
                    raise MeasurementError(f"{command!r} gave {printed} bytes of output, expected {size}")

            contenders = [timed(measured["output"], ours)]
            if floor_names:
                contenders += [
                    timed(measured["pipe"], lambda: floors.output_through_pipe(command, size)),
                    timed(measured["raw pty"], lambda: floors.output_through_pty(command, size)),
                ]
            interleave(contenders, settings.count(10), tick)
        return measured

    definition = (
        f"`yes LINE | head -c {size}` (lines of 79 bytes) in one shell of the {place.name} sandbox, wall time of `Session.run` with the "
        "default limit on kept output; every byte passes through text filter and terminal emulation; median."
    )
    title = f"{size / 1e6:g} MB of output, p50"
    return Benchmark(
        f"{place.name}-output",
        "a command that prints much",
        (_spec(place, "output-p50", title, definition, "output", 50, floor_names),),
        run,
    )


def reset_benchmark(place: Place, settings: Settings) -> Benchmark:
    """Return the benchmark of making a sandbox, of a backend other than ``local``."""

    def run(tick: Tick) -> Measured:
        reset, close = Series(Role.OURS), Series(Role.OURS)
        with place.open() as site:
            interleave([first_command(site.make, reset, close)], settings.count(20), tick)
        return {"reset": reset, "close": close}

    definition = f'From making a {place.name} sandbox until `Session.run("true")` in a new shell of it has answered; image present; median.'
    return Benchmark(
        f"{place.name}-reset",
        "a sandbox from nothing to the first answer",
        (
            _spec(place, "reset-p50", "reset to first answer, p50", definition, "reset", 50),
            _spec(place, "close-p50", "close, p50", "Closing that shell and that sandbox; median.", "close", 50),
        ),
        run,
    )


def _spec(place: Place, name: str, title: str, definition: str, of: str, q: float, against: tuple[str, ...] = ()) -> FigureSpec:
    return FigureSpec(
        f"{place.name}-{name}", f"{place.name}: {title}", definition, "s", percentile(of, q), of, place.targets.get(name), against
    )
