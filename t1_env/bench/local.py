"""The local sandbox, and the environment on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from t1_env.bench import shells
from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import FigureSpec, at_most, percentile
from t1_env.bench.measure import Contender, Measured, MeasurementError, Role, Series, Tick, interleave, timed
from t1_env.env import TerminalEnv
from t1_env.machine import sandbox_spec
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox
from t1_env.tasks import load_task

_CLONE_ENTRY = "t1_env.bench.entry:answer"
UNCHANGED, CHANGED = "true", "echo $((turn += 1)) > /tmp/turn"
"""Commands that leave every file as it is, and that write one."""

PLACE = shells.Place(
    "local",
    lambda: contextlib.nullcontext(shells.Site(LocalSandbox)),
    rounds=50,
    targets={"true-p50": at_most(0.001), "true-p99": at_most(0.005), "output-p50": at_most(1.0)},
)


def benchmarks(settings: Settings) -> list[Benchmark]:
    """Return the benchmarks of one local sandbox."""
    return [
        _reset(settings),
        shells.true_benchmark(PLACE, settings),
        shells.output_benchmark(PLACE, settings),
        _clone(settings),
        _step(settings),
    ]


def _reset(settings: Settings) -> Benchmark:
    def run(tick: Tick) -> Measured:
        spec = sandbox_spec(load_task(settings.task))
        measured = {name: Series(Role.OURS) for name in ("image", "bare", "env.reset", "close", "close bare", "env.close")}
        contenders = [
            shells.first_command(lambda: LocalSandbox(spec), measured["image"], measured["close"]),
            shells.first_command(lambda: LocalSandbox(SandboxSpec()), measured["bare"], measured["close bare"]),
            _first_step(settings, measured["env.reset"], measured["env.close"]),
        ]
        # An environment counts its task's verifiers in the first episodes and knows them afterwards, hence three rounds of warm-up.
        interleave(contenders, settings.count(60), tick, warmup=3)
        return measured

    made = f"From making a local sandbox with the environment of {settings.task} (built before: its layers are cached)"
    return Benchmark(
        "local-reset",
        "a sandbox from nothing to the first answer",
        (
            FigureSpec(
                "local-reset-p50",
                "local: reset to first answer, p50",
                f'{made} until `Session.run("true")` in a new shell of it has answered; median.',
                "s",
                percentile("image", 50),
                "image",
                at_most(0.05),
                ("bare", "env.reset"),
            ),
            FigureSpec(
                "local-reset-p95",
                "local: reset to first answer, p95",
                "The same; 95th percentile.",
                "s",
                percentile("image", 95),
                "image",
            ),
            FigureSpec(
                "local-close-p50",
                "local: close, p50",
                "Closing that shell and that sandbox; median.",
                "s",
                percentile("close", 50),
                "close",
            ),
        ),
        run,
    )


def _first_step(settings: Settings, reset: Series, close: Series) -> Contender:
    def take() -> tuple[float, float]:
        env = TerminalEnv(settings.task)
        try:
            start = time.perf_counter()
            env.reset(seed=0)
            step_checked(env, UNCHANGED, verified=False)
            answered = time.perf_counter()
        finally:
            env.close()
        return answered - start, time.perf_counter() - answered

    return Contender((reset, close), take)


def _clone(settings: Settings) -> Benchmark:
    def run(tick: Tick) -> Measured:
        measured = {"clone": Series(Role.OURS)}
        with LocalSandbox() as sandbox:

            def clone() -> None:
                result = sandbox.run_in_clone(_CLONE_ENTRY, "yes")
                if result.payload != "yes":
                    raise MeasurementError(f"a clone answered {result.payload!r}, expected 'yes'; error: {result.error}")

            interleave([timed(measured["clone"], clone, 5)], settings.count(30), tick, warmup=3)
        return measured

    definition = (
        "`Sandbox.run_in_clone` of a function that returns its argument: freeze, fork, stack and mount the clone, call, discard, thaw; "
        "median."
    )
    spec = FigureSpec("local-clone-p50", "local: verification clone, p50", definition, "s", percentile("clone", 50), "clone")
    return Benchmark("local-clone", "a copy-on-write clone of a sandbox", (spec,), run)


def _step(settings: Settings) -> Benchmark:
    def run(tick: Tick) -> Measured:
        measured = {"unchanged": Series(Role.OURS), "verified": Series(Role.OURS)}
        with open_env(settings.task) as env:
            contenders = [
                timed(measured["unchanged"], lambda: step_checked(env, UNCHANGED, verified=False), 20),
                timed(measured["verified"], lambda: step_checked(env, CHANGED, verified=True), 2),
            ]
            interleave(contenders, settings.count(40), tick, warmup=3)
        return measured

    return Benchmark(
        "local-step",
        "steps of the environment",
        (
            FigureSpec(
                "local-step-p50",
                "local: env.step, nothing changed, p50",
                f"`env.step({UNCHANGED!r})` of {settings.task}, observation and screen included; no file changes, so no verifier "
                "runs; median.",
                "s",
                percentile("unchanged", 50),
                "unchanged",
            ),
            FigureSpec(
                "local-step-verified-p50",
                "local: env.step, verified, p50",
                "A step that writes one file, so that all verifiers of the task run in a clone; median.",
                "s",
                percentile("verified", 50),
                "verified",
            ),
        ),
        run,
    )


@contextlib.contextmanager
def open_env(task: str) -> Iterator[TerminalEnv]:
    """Give an environment that was reset and does not end by itself."""
    env = TerminalEnv(task, max_turns=1_000_000, end_on_solved=False)
    try:
        env.reset(seed=0)
        yield env
    finally:
        env.close()


def step_checked(env: TerminalEnv, command: str, *, verified: bool) -> dict[str, Any]:
    """Take a step whose command must succeed.

    Args:
        env: An environment in an episode.
        command: The command.
        verified: Whether the step must have run the verifiers, or must not have.

    Returns:
        The observation.

    Raises:
        MeasurementError: If it went otherwise.
    """
    observation, _, _, _, info = env.step(command)
    if observation["exit_code"] != 0 or info["infra_error"] is not None:
        raise MeasurementError(f"env.step({command!r}) ended with status {observation['exit_code']}; infra error: {info['infra_error']}")
    if ("verify" in info["_timing"]) is not verified:
        raise MeasurementError(f"env.step({command!r}) {'ran no' if verified else 'ran the'} verifiers, expected the opposite")
    return observation
