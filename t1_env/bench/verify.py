"""What it costs to verify a step: clone, ten tests, and what they would cost without T1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.conformance import benchmark as conformance
from t1_env.bench.figures import FigureSpec, Target, at_most, percentile, ratio
from t1_env.bench.local import CHANGED, UNCHANGED, step_checked
from t1_env.bench.measure import Measured, MeasurementError, Role, Series, Tick, interleave, timed
from t1_env.env import TerminalEnv
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox
from t1_env.tasks import Task, load_task

THINKING_S: Final = 0.05
"""How long a simulated policy takes for a turn."""
UPPER_MB: Final = 200
_TESTS: Final = 10
_LOCAL_IMAGE: Final = "debian:bookworm-slim"
_CLONE_ENTRY: Final = "t1_env.bench.entry:answer"
_PYTEST_TIMEOUT_S: Final = 300.0
_PREPARE: Final = (
    "mkdir -p out",
    "for i in 0 1 2 3 4 5; do seq $((i + 100)) > out/numbers-$i; done",
    """echo '{"name": "bench", "sizes": [1, 2, 3]}' > out/report.json""",
    "printf 'a,b\\n1,2\\n3,4\\n' > out/table.csv",
    "printf '#!/bin/sh\\necho ran\\n' > out/run; chmod +x out/run",
)
"""What the tests look at; one command a step."""
_TEST_FILE: Final = '''\
"""Ten verifiers of the usual kinds: contents of files, JSON, CSV, modes, and a program that is run."""

import csv, json, os, subprocess
from pathlib import Path

import pytest

OUT = Path(os.environ.get("T1_BENCH_ROOT", "/app")) / "out"


@pytest.mark.parametrize("index", range(6))
def test_numbers(index):
    assert (OUT / f"numbers-{index}").read_text().split() == [str(n) for n in range(1, index + 101)]


def test_report():
    assert json.loads((OUT / "report.json").read_text()) == {"name": "bench", "sizes": [1, 2, 3]}


def test_table():
    assert list(csv.DictReader((OUT / "table.csv").open())) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_mode():
    assert os.access(OUT / "run", os.X_OK)


def test_program():
    assert subprocess.run([OUT / "run"], capture_output=True, text=True).stdout == "ran\\n"
'''
_TEST_SH: Final = '#!/bin/bash\npython3 -m pytest -rA "$(dirname "$0")/test_outputs.py"\n'


def benchmarks(settings: Settings) -> list[Benchmark]:
    """Return the benchmarks of verification in the local sandbox.

    Args:
        settings: How large.
    """
    found = [_steps(settings, "local", at_most(0.060), peers=True), _upper(settings), _beside(settings)]
    return [*found, conformance(settings)] if settings.conformance else found


def docker_benchmarks(settings: Settings) -> list[Benchmark]:
    """Return the benchmark of verification in containers.

    Args:
        settings: Names the image.
    """
    return [_steps(settings, "docker", at_most(0.150), peers=False)]


@contextlib.contextmanager
def ten_tests(image: str = _LOCAL_IMAGE) -> Iterator[Task]:
    """Give a task with ten verifiers, written to a temporary directory.

    Args:
        image: What it starts from.
    """
    with tempfile.TemporaryDirectory(prefix="t1-bench-") as directory:
        for name, text in {
            "instruction.md": "Make what the tests look at.",
            "task.toml": "",
            "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n",
            "tests/test_outputs.py": _TEST_FILE,
            "tests/test.sh": _TEST_SH,
        }.items():
            path = Path(directory, "ten-tests", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        yield load_task(Path(directory, "ten-tests"))


@contextlib.contextmanager
def open_env(task: Task, **arguments: Any) -> Iterator[TerminalEnv]:
    """Give an environment in which everything that the ten tests look at is there, and which does not end by itself."""
    env = TerminalEnv(task, max_turns=1_000_000, end_on_solved=False, verbatim=False, **arguments)
    try:
        env.reset(seed=0)
        for command in _PREPARE:
            env.step(command)
        info = env.step(UNCHANGED)[4]
        if info["verifiers_passed"] != _TESTS:
            raise MeasurementError(f"{info['verifiers_passed']} of the {_TESTS} verifiers pass where all should: {info['verifiers']}")
        yield env
    finally:
        env.close()


def _steps(settings: Settings, sandbox: str, target: Target, *, peers: bool) -> Benchmark:
    def run(tick: Tick) -> Measured:
        measured = {name: Series(Role.OURS) for name in ("verified", "unchanged")}
        image = _docker_image(settings) if sandbox == "docker" else _LOCAL_IMAGE
        with contextlib.ExitStack() as stack:
            task = stack.enter_context(ten_tests(image))
            env = stack.enter_context(open_env(task, sandbox=sandbox))
            contenders = [
                timed(measured["verified"], lambda: step_checked(env, CHANGED, verified=True), 5),
                timed(measured["unchanged"], lambda: step_checked(env, UNCHANGED, verified=False), 20),
            ]
            if peers:
                measured["pytest cold"], measured["pytest, no plugins"] = Series(Role.PEER), Series(Role.PEER)
                measured["python -c pass"] = Series(Role.FLOOR)
                cold = stack.enter_context(_pytest(task))
                contenders += [
                    timed(measured["pytest cold"], lambda: cold([])),
                    timed(measured["pytest, no plugins"], lambda: cold(["-p", "no:cacheprovider"], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")),
                    timed(measured["python -c pass"], lambda: subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)),
                ]
            interleave(contenders, settings.count(30), tick, warmup=2)
        return measured

    beside = ("pytest cold", "pytest, no plugins", "python -c pass") if peers else ()
    return Benchmark(
        f"{sandbox}-verify",
        f"a verified step of a task with {_TESTS} tests",
        (
            FigureSpec(
                f"{sandbox}-verify-p50",
                f"{sandbox}: verified step, {_TESTS} tests, p50",
                f"`env.step` of a command that writes one file, in a {sandbox} sandbox, with {_TESTS} verifiers of the usual kinds, all "
                "passing: command, change detection, freeze, clone, run, discard, thaw, observation; median."
                + (" Beside it: `python -m pytest` on the same tests and files, from nothing." if peers else ""),
                "s",
                percentile("verified", 50),
                "verified",
                target,
                beside,
            ),
            FigureSpec(
                f"{sandbox}-verify-p95", f"{sandbox}: the same, p95", "95th percentile.", "s", percentile("verified", 95), "verified"
            ),
            FigureSpec(
                f"{sandbox}-verify-unchanged-p50",
                f"{sandbox}: step that changes no file, p50",
                f"`env.step({UNCHANGED!r})` in the same episode, taking turns with it: that nothing changed is found out; median.",
                "s",
                percentile("unchanged", 50),
                "unchanged",
                at_most(0.002) if sandbox == "local" else None,
            ),
        ),
        run,
    )


def _docker_image(settings: Settings) -> str:
    image = settings.docker_image or os.environ.get("T1_DOCKER_IMAGE")
    if not image:
        raise MeasurementError("no image for the containers: give --docker-image NAME, or set T1_DOCKER_IMAGE; bash must be in it")
    return image


@contextlib.contextmanager
def _pytest(task: Task) -> Iterator[Callable[..., None]]:
    """Give what runs pytest on the ten tests from nothing, as a harness does that starts it after each step."""
    with tempfile.TemporaryDirectory(prefix="t1-bench-") as directory:
        for command in _PREPARE:
            subprocess.run(["bash", "-c", command], cwd=directory, check=True)

        def run(options: list[str], **environ: str) -> None:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *options, str(task.tests_dir)]
            done = subprocess.run(
                command,
                cwd=directory,
                env={**os.environ, "T1_BENCH_ROOT": directory, "PYTHONDONTWRITEBYTECODE": "1", **environ},
                capture_output=True,
                timeout=_PYTEST_TIMEOUT_S,
                check=False,
            )
            if f"{_TESTS} passed" not in done.stdout.decode("utf-8", "replace"):
                raise MeasurementError(f"pytest ended with status {done.returncode}: {done.stdout[-500:].decode('utf-8', 'replace')}")

        yield run


def _upper(settings: Settings) -> Benchmark:
    empty, full = "empty", f"{UPPER_MB} MB"

    def run(tick: Tick) -> Measured:
        measured = {empty: Series(Role.OURS), full: Series(Role.OURS)}
        spec = SandboxSpec(storage_mb=2 * UPPER_MB)
        with LocalSandbox(spec) as bare, LocalSandbox(spec) as laden:
            fill = f"mkdir big && for i in $(seq {UPPER_MB}); do head -c 1M /dev/urandom > big/$i || exit 1; done"
            written = laden.run(["bash", "-c", fill], timeout_s=300)
            if written.exit_code != 0:
                raise MeasurementError(f"{UPPER_MB} MB could not be written: status {written.exit_code}, {written.stderr[-200:]!r}")

            def clone(sandbox: LocalSandbox) -> None:
                result = sandbox.run_in_clone(_CLONE_ENTRY, "yes")
                if result.payload != "yes":
                    raise MeasurementError(f"a clone answered {result.payload!r}, expected 'yes'; error: {result.error}")

            contenders = [timed(measured[empty], lambda: clone(bare), 5), timed(measured[full], lambda: clone(laden), 5)]
            interleave(contenders, settings.count(30), tick, warmup=3)
        return measured

    definition = (
        f"`Sandbox.run_in_clone` of a function that returns its argument, in a sandbox that wrote {UPPER_MB} files of 1 MB, over that in "
        "one that wrote nothing; both in turn, paired by rounds."
    )
    return Benchmark(
        "local-verify-upper",
        "what an agent's files add to a clone",
        (
            FigureSpec(
                "local-verify-upper-ratio",
                f"local: clone with {UPPER_MB} MB written / with nothing",
                definition,
                "x",
                ratio(full, empty),
                full,
                at_most(1.5),
                (empty,),
            ),
        ),
        run,
    )


def _beside(settings: Settings) -> Benchmark:
    def run(tick: Tick) -> Measured:
        measured = {"beside": Series(Role.OURS), "waiting": Series(Role.OURS)}
        with ten_tests() as task, open_env(task) as waiting, open_env(task, verify_async=True) as beside:

            def turn(env: TerminalEnv) -> None:
                time.sleep(THINKING_S)
                info = env.step(CHANGED)[4]
                if info["infra_error"] is not None or info["verifiers_passed"] != _TESTS:
                    raise MeasurementError(f"{info['verifiers_passed']} of {_TESTS} verifiers pass; infra error: {info['infra_error']}")

            def five(env: TerminalEnv) -> None:
                for _ in range(5):
                    turn(env)
                env.unwrapped.collect_late_reward()  # type: ignore[attr-defined]

            contenders = [timed(measured["beside"], lambda: five(beside)), timed(measured["waiting"], lambda: five(waiting))]
            interleave(contenders, settings.count(20), tick)
        return measured

    return Benchmark(
        "local-verify-async",
        f"turns of a policy that thinks for {THINKING_S * 1000:g} ms",
        (
            FigureSpec(
                "local-verify-async-ratio",
                "local: turns with verify_async=True / False",
                f"Five turns of {THINKING_S * 1000:g} ms of sleep and a verified `env.step` ({_TESTS} tests), the last one's reward waited "
                "for: with the verifiers beside the sleep, over with the step waiting for them; in turn, paired by rounds.",
                "x",
                ratio("beside", "waiting"),
                "beside",
                None,
                ("waiting",),
            ),
        ),
        run,
    )
