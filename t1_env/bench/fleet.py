"""Many local sandboxes in one process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import gymnasium as gym

from t1_env.bench import floors
from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.facts import available_memory_bytes
from t1_env.bench.figures import FigureSpec, Target, at_least, at_most, percentile
from t1_env.bench.local import CHANGED, UNCHANGED
from t1_env.bench.measure import Contender, Measured, MeasurementError, Role, Series, Tick, interleave
from t1_env.bench.shells import open_shell, run_checked
from t1_env.sandbox.local import LocalSandbox
from t1_env.shell import Session

_STEPS: Final = 20
_MEGABYTE: Final = 1_000_000
_MIN_STEPS_PER_S: Final = 500.0
_MAX_RESIDENT_BYTES: Final = 15.0 * _MEGABYTE


def benchmarks(settings: Settings) -> list[Benchmark]:
    """Return the benchmarks of many sandboxes at a time."""
    return [_sessions(settings), _vector(settings), _memory(settings)]


def _sessions(settings: Settings) -> Benchmark:
    size = settings.fleet_size

    def run(tick: Tick) -> Measured:
        measured = {
            "/bin/true": Series(Role.OURS, "steps/s"),
            "true": Series(Role.OURS, "steps/s"),
            "bash loops": Series(Role.FLOOR, "steps/s"),
        }
        with open_fleet(size) as sessions, ThreadPoolExecutor(size) as pool:

            def step_all(command: str) -> float:
                def play(session: Session) -> None:
                    for _ in range(_STEPS):
                        run_checked(session, command)

                return _rate(lambda: list(pool.map(play, sessions)), size * _STEPS)

            contenders = [
                Contender((measured["/bin/true"],), lambda: (step_all("/bin/true"),)),
                Contender((measured["true"],), lambda: (step_all("true"),)),
                Contender((measured["bash loops"],), lambda: (floors.spawn_rate(size * _STEPS // 4),)),
            ]
            interleave(contenders, settings.count(15), tick)
        return measured

    told = (
        f"{size} local sandboxes in one process, a thread each, all stepping for {_STEPS} steps; steps of all together per second; median "
        "of rounds."
    )
    return Benchmark(
        "local-fleet",
        f"{size} sandboxes stepping at the same time",
        (
            FigureSpec(
                "local-fleet-bin-true",
                f"local: {size} sandboxes, `/bin/true`",
                f"`/bin/true` through `Session.run` in {told}",
                "steps/s",
                percentile("/bin/true", 50),
                "/bin/true",
                at_least(_MIN_STEPS_PER_S),
                ("bash loops",),
            ),
            FigureSpec(
                "local-fleet-true",
                f"local: {size} sandboxes, `true`",
                f"The builtin `true` through `Session.run` in {told}",
                "steps/s",
                percentile("true", 50),
                "true",
                at_least(_MIN_STEPS_PER_S),
            ),
        ),
        run,
    )


def _vector(settings: Settings) -> Benchmark:
    size = settings.fleet_size

    def run(tick: Tick) -> Measured:
        measured = {"env.step": Series(Role.OURS, "steps/s"), "env.step verified": Series(Role.OURS, "steps/s")}
        env = gym.make_vec("T1Terminal-v0", num_envs=size, task=settings.task, max_turns=1_000_000, end_on_solved=False)
        try:
            env.reset(seed=0)

            def step_all(command: str, steps: int, *, verified: bool) -> tuple[float]:
                def play() -> None:
                    for _ in range(steps):
                        _step_vector(env, command, size, verified=verified)

                return (_rate(play, size * steps),)

            contenders = [
                Contender((measured["env.step"],), lambda: step_all(UNCHANGED, _STEPS, verified=False)),
                Contender((measured["env.step verified"],), lambda: step_all(CHANGED, 1, verified=True)),
            ]
            interleave(contenders, settings.count(15), tick)
        finally:
            env.close()
        return measured

    told = f"vector environment of {size} (`gym.make_vec`), all stepping: steps of all together per second; median of rounds."
    return Benchmark(
        "local-vector",
        f"a vector environment of {size}",
        (
            FigureSpec(
                "local-vector-step",
                f"local: vector of {size}, nothing changed",
                f"`env.step` of `true` in a {told}",
                "steps/s",
                percentile("env.step", 50),
                "env.step",
                at_least(_MIN_STEPS_PER_S),
            ),
            FigureSpec(
                "local-vector-step-verified",
                f"local: vector of {size}, verified",
                f"A step that writes a file, so that the task's verifiers run in a clone, in a {told}",
                "steps/s",
                percentile("env.step verified", 50),
                "env.step verified",
            ),
        ),
        run,
    )


def _memory(settings: Settings) -> Benchmark:
    size = settings.fleet_size
    by_process = os.geteuid() == 0  # /proc shows to root only what the processes of a sandbox take

    def run(tick: Tick) -> Measured:
        measured: Measured = {}
        rounds = settings.count(5, least=1)
        with open_fleet(1):  # whatever is made once for the process, such as the launcher, is there
            pass
        for done in range(rounds):
            for name, value in _weigh(size, by_process=by_process).items():
                measured.setdefault(name, Series(Role.OURS, "bytes")).blocks.append((value,))
            tick((done + 1) / rounds)
        return measured

    told = f"{size} local sandboxes with a shell each that has run a command, divided by {size}; median of rounds"
    pss = (
        "Memory in use (proportional set size: a page shared by n processes counts 1/n for each) of all new processes (keeper, pid 1, "
        f"bash), and growth of this process: {told}."
    )
    rss = f"The same with resident set sizes, which count shared pages once for each process: {told}."
    available = (
        f"How much less memory the kernel calls available (page tables, kernel memory and tmpfs included, and noise of others): {told}."
    )
    host = f"Growth of this process alone (resident set size): {told}."
    figures = [_memory_figure("available", f"drop of MemAvailable each of {size}", available)]
    if by_process:
        figures = [
            _memory_figure("pss", f"memory each of {size} (PSS)", pss, at_most(_MAX_RESIDENT_BYTES)),
            _memory_figure("rss", f"sum of RSS each of {size}", rss),
            *figures,
            _memory_figure("host", f"growth of this process for each of {size}", host),
        ]
    return Benchmark("local-memory", f"memory of {size} sandboxes", tuple(figures), run)


def _memory_figure(of: str, title: str, definition: str, target: Target | None = None) -> FigureSpec:
    return FigureSpec(f"local-memory-{of}", f"local: {title}", definition, "bytes", percentile(of, 50), of, target)


def _weigh(size: int, *, by_process: bool) -> dict[str, float]:
    """Return what each of ``size`` sandboxes takes, in bytes; without ``by_process`` only what the machine as a whole tells."""
    before, available_before = set(_descendants()), available_memory_bytes()
    host_before = _resident(os.getpid())["Rss"]
    with open_fleet(size):
        available = available_before - available_memory_bytes()
        if not by_process:
            return {"available": available / size}
        found = [_resident(pid) for pid in _descendants() if pid not in before]
        host = max(0, _resident(os.getpid())["Rss"] - host_before)
    return {
        "pss": (sum(process["Pss"] for process in found) + host) / size,
        "rss": (sum(process["Rss"] for process in found) + host) / size,
        "host": host / size,
        "available": available / size,
    }


def _resident(pid: int) -> dict[str, int]:
    """Return ``Rss`` and ``Pss`` of a process in bytes."""
    sizes = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("Rss", "Pss"):
                sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def _descendants() -> list[int]:
    """Return the process ids of all children of this process, and of theirs."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as stat:  # noqa: PTH123
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        born = children.get(waiting.pop(), [])
        found += born
        waiting += born
    return found


@contextlib.contextmanager
def open_fleet(size: int) -> Iterator[list[Session]]:
    """Start local sandboxes with a shell each that has run a command, from as many threads; all are gone afterwards."""

    def start() -> tuple[contextlib.ExitStack, Session]:
        with contextlib.ExitStack() as own:
            session = own.enter_context(open_shell(LocalSandbox()))
            run_checked(session, "true")
            return own.pop_all(), session

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(size) as pool:
            started = [pool.submit(start) for _ in range(size)]
        for future in started:  # all have ended: what was started is closed even if another could not be
            if future.exception() is None:
                stack.push(future.result()[0])
        yield [future.result()[1] for future in started]


def _rate(action: Callable[[], object], steps: int) -> float:
    start = time.perf_counter()
    action()
    return steps / (time.perf_counter() - start)


def _step_vector(env: Any, command: str, size: int, *, verified: bool) -> None:
    observations, _, _, _, infos = env.step([command] * size)
    if observations["exit_code"].any() or any(error is not None for error in infos["infra_error"]):
        raise MeasurementError(f"not every environment ran {command!r}: {observations['exit_code']}, {infos['infra_error']}")
    if any(("verify" in timing) is not verified for timing in infos["_timing"]):
        raise MeasurementError(
            f"{'not every' if verified else 'an'} environment ran its verifiers after {command!r}, expected the opposite"
        )
