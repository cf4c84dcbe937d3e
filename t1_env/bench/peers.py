"""Other people's shells beside ours: the same commands, in turn, in the same run.

SWE-ReX's local deployment is the peer: a persistent bash for agents, without isolation. It and pexpect are imported only here; nothing of
T1 needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import FigureSpec, at_least, mean, ratio
from t1_env.bench.measure import Contender, Measured, MeasurementError, Role, Series, Tick, interleave, third_party, timed
from t1_env.bench.shells import first_command, open_shell, output_command, run_checked
from t1_env.errors import DependencyMissing
from t1_env.sandbox.local import LocalSandbox

SWE_REX: Final = "SWE-ReX"
_REPL: Final = "pexpect REPL"
_LOST: Final = "SWE-ReX status lost"
_TIMEOUT_S: Final = 900.0
_MIN_TRUE, _MIN_OUTPUT = 100.0, 20.0
_QUICK_OUTPUT_BYTES: Final = 1_000_000


def require_peers() -> None:
    """Raise ``DependencyMissing`` if SWE-ReX is not installed."""
    if any(importlib.util.find_spec(module) is None for module in ("swerex", "pexpect")):
        raise DependencyMissing("SWE-ReX, which --peers measures beside T1, is not installed: python -m pip install swe-rex")


def benchmarks(settings: Settings) -> list[Benchmark]:
    """Return the benchmarks against SWE-ReX's local deployment."""
    return [_start(settings), _true(settings), _output(settings)]


class RexShell:
    """One bash of SWE-ReX's local deployment, as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._messages: Any = importlib.import_module("swerex.runtime.abstract")
        self._deployment: Any = importlib.import_module("swerex.deployment.local").LocalDeployment()

        self.lost_status = 0
        """Commands whose exit status it could not tell; its own time limits make that happen on a busy machine."""

    def __enter__(self) -> Self:
        try:
            with third_party(SWE_REX):
                self._loop.run_until_complete(self._deployment.start())
                self._loop.run_until_complete(self._deployment.runtime.create_session(self._messages.CreateBashSessionRequest()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with third_party(SWE_REX):
                self._loop.run_until_complete(self._deployment.stop())
        finally:
            self._deployment = None  # it logs when it is deleted: not later than here
            self._loop.close()

    def run(self, command: str) -> str:
        """Run a command that must succeed, and return its output.

        Raises:
            MeasurementError: If it ended with another status than 0.
        """
        with third_party(SWE_REX):
            action = self._messages.BashAction(command=command, timeout=_TIMEOUT_S, check="silent")
            result = self._loop.run_until_complete(self._deployment.runtime.run_in_session(action))
        self.lost_status += result.exit_code is None
        if result.exit_code not in (0, None):
            raise MeasurementError(f"{SWE_REX}: {command!r} ended with status {result.exit_code}")
        return str(result.output)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep SWE-ReX from logging every command to the terminal, which would be measured too."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _start(settings: Settings) -> Benchmark:
    def run(tick: Tick) -> Measured:
        measured = {
            "T1": Series(Role.OURS),
            "T1 close": Series(Role.OURS),
            SWE_REX: Series(Role.PEER),
            f"{SWE_REX} close": Series(Role.PEER),
        }

        def theirs() -> tuple[float, float]:
            start = time.perf_counter()
            with RexShell() as shell:
                shell.run("true")
                answered = time.perf_counter()
            return answered - start, time.perf_counter() - answered

        contenders = [
            first_command(LocalSandbox, measured["T1"], measured["T1 close"]),
            Contender((measured[SWE_REX], measured[f"{SWE_REX} close"]), theirs),
        ]
        with quiet():
            interleave(contenders, settings.count(10), tick)
        return measured

    definition = (
        "From nothing to the first answered `true`: SWE-ReX's local deployment with a session (no isolation) over T1's local sandbox with "
        "a shell, in turn; median of the rounds' ratios."
    )
    spec = FigureSpec(
        "peer-start-ratio", "SWE-ReX / T1: start to first answer", definition, "x", ratio(SWE_REX, "T1"), "T1", None, (SWE_REX,)
    )
    return Benchmark("peer-start", "start of a shell, beside SWE-ReX", (spec,), run)


def _true(settings: Settings) -> Benchmark:
    def run(tick: Tick) -> Measured:
        measured = {"T1": Series(Role.OURS), SWE_REX: Series(Role.PEER), _REPL: Series(Role.PEER), _LOST: Series(Role.PEER, "share")}
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            session = stack.enter_context(open_shell(LocalSandbox()))
            rex = stack.enter_context(RexShell())
            repl_true = stack.enter_context(_pexpect_repl())

            def theirs() -> tuple[float, float]:
                start, lost = time.perf_counter(), rex.lost_status
                rex.run("true")
                return time.perf_counter() - start, float(rex.lost_status - lost)

            contenders = [
                timed(measured["T1"], lambda: run_checked(session, "true"), 20),
                Contender((measured[SWE_REX], measured[_LOST]), theirs),
                timed(measured[_REPL], repl_true),
            ]
            interleave(contenders, settings.count(40), tick, warmup=2)
        return measured

    definition = (
        "`true` in one persistent shell: SWE-ReX's `run_in_session` over T1's `Session.run`, in turn; median of the rounds' ratios. "
        "The pexpect REPL is `pexpect.replwrap.bash()`, which reports no exit status."
    )
    spec = FigureSpec(
        "peer-true-ratio", "SWE-ReX / T1: `true`", definition, "x", ratio(SWE_REX, "T1"), "T1", at_least(_MIN_TRUE), (SWE_REX, _REPL)
    )
    lost = FigureSpec(
        "peer-true-lost-status",
        "SWE-ReX: `true` without an exit status",
        "Share of SWE-ReX's `true` that came back without an exit status. One such step of T1 fails the benchmark.",
        "share",
        mean(_LOST),
        _LOST,
    )
    return Benchmark("peer-true", "small commands, beside SWE-ReX", (spec, lost), run)


def _output(settings: Settings) -> Benchmark:
    full = settings.fraction >= 1
    size = settings.output_bytes if full else min(settings.output_bytes, _QUICK_OUTPUT_BYTES)
    command = output_command(size)

    def run(tick: Tick) -> Measured:
        measured = {"T1": Series(Role.OURS), SWE_REX: Series(Role.PEER)}
        with quiet(), open_shell(LocalSandbox()) as session, RexShell() as rex:

            def theirs() -> None:
                printed = len(rex.run(command))
                if printed < size - 1:  # it adds some characters of its own, and takes the last newline
                    raise MeasurementError(f"{SWE_REX}: {command!r} gave {printed} characters of output, expected {size}")

            contenders = [timed(measured["T1"], lambda: run_checked(session, command), 3), timed(measured[SWE_REX], theirs)]
            interleave(contenders, 1, tick, warmup=0)
        return measured

    definition = (
        f"`yes LINE | head -c {size}` (lines of 79 bytes) in one persistent shell: SWE-ReX over T1; one run of SWE-ReX, whose cost grows "
        "with the square of the size, and the median of three of T1 beside it."
    )
    if not full:
        definition += " With --quick the size is smaller than the target's, so the target does not apply."
    title = f"SWE-ReX / T1: {size / 1e6:g} MB of output"
    target = at_least(_MIN_OUTPUT) if full else None
    spec = FigureSpec("peer-output-ratio", title, definition, "x", ratio(SWE_REX, "T1"), "T1", target, (SWE_REX,))
    return Benchmark("peer-output", "a command that prints much, beside SWE-ReX", (spec,), run)


@contextlib.contextmanager
def _pexpect_repl() -> Iterator[Callable[[], object]]:
    """Give what runs ``true`` once in a bash of pexpect's."""
    with third_party(_REPL):
        repl = importlib.import_module("pexpect.replwrap").bash()

    def run() -> None:
        with third_party(_REPL):
            repl.run_command("true", timeout=_TIMEOUT_S)

    try:
        yield run
    finally:
        with third_party(_REPL):
            repl.child.close(force=True)
