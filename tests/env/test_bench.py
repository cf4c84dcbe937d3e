"""``t1-env bench``: statistics and definitions, pairing, the report's form, mistakes, and a tiny run. No time is ever asserted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.bench import conformance, facts, figures, fleet, local, peers, runner, statistics, turns, verify
from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import FigureSpec, at_least, at_most, evaluate, percentile, ratio
from t1_env.bench.measure import Contender, Measured, MeasurementError, Role, Series, Tick, extend, interleave, third_party, timed
from t1_env.bench.report import Failure, Report, format_value
from t1_env.cli.main import main
from t1_env.errors import ConfigError, DependencyMissing, T1Error
from t1_env.protocol import Submit
from t1_env.sandbox.local import unavailable_reason
from t1_env.tasks import resolve_tasks

WHY_NOT = unavailable_reason()
CONFORMANCE = Settings(fraction=0.001, conformance=True)
TINY = Settings(fraction=0.001, fleet_size=2, output_bytes=100_000, task="seeds/hello-file")
samples = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50)


def needs_namespaces(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.namespaces(pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(test))


def nothing(_: float) -> None:
    """Takes progress."""


def series(*blocks: tuple[float, ...], role: Role = Role.OURS, unit: str = "s") -> Series:
    return Series(role, unit, list(blocks))


# ------------------------------------------------------------------------------------------------------------------- statistics
@given(samples, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert statistics.percentile(values, q) == np.percentile(values, q)


@given(samples)
def test_a_summary_is_of_all_samples(values: list[float]) -> None:
    summary = statistics.summarise(values)
    said = summary.as_dict()
    assert (said["count"], said["min"], said["max"]) == (len(values), min(values), max(values))
    assert (said["mean"], said["std"]) == pytest.approx((np.mean(values), np.std(values)))
    assert [said[f"p{q}"] for q in statistics.PERCENTILES] == [np.percentile(values, q) for q in statistics.PERCENTILES]
    assert said["p5"] <= said["p50"] <= said["p99"] <= said["max"]


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_nothing_is_made_of_no_samples_or_of_numbers_that_are_none(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="samples"):
        statistics.summarise(values)


def test_no_percentile_of_nothing() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        statistics.percentile([], 50)


def test_a_ratio_pairs_blocks_so_that_a_slow_time_slows_both() -> None:
    ours = [(1.0, 1.0, 1.0), (10.0, 10.0, 10.0), (1.0, 1.0, 50.0)]
    theirs = [(100.0,), (1000.0,), (100.0,)]
    assert statistics.paired_ratio(theirs, ours) == 100.0
    assert statistics.paired_ratio(ours, theirs) == 0.01


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.1, 10)), min_size=1, max_size=20), st.floats(0.1, 10))
def test_a_common_slowdown_of_each_round_leaves_the_ratio_alone(rounds: list[tuple[float, float]], factor: float) -> None:
    ours = [(slow * value,) for value, slow in rounds]
    theirs = [(slow * value * factor,) for value, slow in rounds]
    assert statistics.paired_ratio(theirs, ours) == pytest.approx(factor)


@pytest.mark.parametrize(("over", "under"), [([], []), ([(1.0,)], [(1.0,), (1.0,)])])
def test_blocks_that_do_not_pair_are_refused(over: list[tuple[float, ...]], under: list[tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"do not pair: \d against \d"):
        statistics.paired_ratio(over, under)


# ------------------------------------------------------------------------------------------------------------------- measuring
def test_contenders_take_turns_and_fill_blocks() -> None:
    calls: list[str] = []
    counts = {"a": 3, "b": 1}
    filled = {name: Series(Role.OURS) for name in counts}

    def contender(name: str) -> Contender:
        def take() -> tuple[float]:
            calls.append(name)
            return (float(len(calls)),)

        return Contender((filled[name],), take, counts[name])

    told: list[float] = []
    interleave([contender("a"), contender("b")], 8, told.append, warmup=2)
    assert calls[:4] == ["a", "a", "b", "b"]  # warm-up
    rounds = ["".join(calls[4 + 4 * index : 8 + 4 * index]) for index in range(8)]
    assert set(rounds) == {"aaab", "baaa"}, "a block is one contender's own, and the order changes"
    assert [len(block) for block in filled["a"].blocks] == [3] * 8
    assert [len(block) for block in filled["b"].blocks] == [1] * 8
    assert told == [(done + 1) / 8 for done in range(8)]


def test_one_contender_may_measure_several_things() -> None:
    first, second = Series(Role.OURS), Series(Role.OURS)
    interleave([Contender((first, second), lambda: (1.0, 2.0), block=2)], 2, nothing)
    assert (first.blocks, second.blocks) == ([(1.0, 1.0)] * 2, [(2.0, 2.0)] * 2)


def test_a_sample_is_the_wall_time_of_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.25])
    monkeypatch.setattr("t1_env.bench.measure.time.perf_counter", lambda: next(clock))
    assert timed(Series(Role.OURS), lambda: None).take() == (0.25,)


def test_runs_of_the_same_benchmark_are_pooled() -> None:
    measured: Measured = {}
    for value in (1.0, 2.0):
        extend(measured, {"x": series((value,), role=Role.FLOOR, unit="steps/s")})
    assert measured["x"].values == [1.0, 2.0]
    assert measured["x"].as_dict() == {"role": "floor", "unit": "steps/s", "blocks": 2, **statistics.summarise([1.0, 2.0]).as_dict()}


@pytest.mark.parametrize(
    ("arguments", "named"), [({"fraction": 0}, "fraction"), ({"fraction": 1.1}, "fraction"), ({"fleet_size": 0}, "fleet_size")]
)
def test_settings_are_checked(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings(**arguments)


def test_counts_scale_but_stay_counts() -> None:
    assert Settings().count(60) == 60
    assert Settings(fraction=0.1).count(60) == 6
    assert Settings(fraction=0.001).count(60) == 2
    assert Settings(fraction=0.001).count(60, least=1) == 1


# --------------------------------------------------------------------------------------------------------------------- figures
def spec(**changes: Any) -> FigureSpec:
    values: dict[str, Any] = {
        "name": "a-true-p50",
        "title": "a: true",
        "definition": "What it is.",
        "unit": "s",
        "value": percentile("ours", 50),
        "of": "ours",
        "target": at_most(2.0),
        "against": ("floor", "peer"),
    }
    return FigureSpec(**{**values, **changes})


MEASURED: Measured = {
    "ours": series((1.0, 3.0), (2.0, 2.0)),
    "floor": series((1.0,), (1.0,), role=Role.FLOOR),
    "peer": series((200.0,), (200.0,), role=Role.PEER),
}


def test_a_figure_states_value_target_and_what_was_beside_it() -> None:
    figure = evaluate(spec(), "a-true", MEASURED)
    assert figure.as_dict() == {
        "name": "a-true-p50",
        "benchmark": "a-true",
        "title": "a: true",
        "definition": "What it is.",
        "unit": "s",
        "value": 2.0,
        "target": {"limit": 2.0, "better": "lower"},
        "met": True,
        "compared_with": [
            {"name": "floor", "role": "floor", "value": 1.0, "ratio": 0.5},
            {"name": "peer", "role": "peer", "value": 200.0, "ratio": 100.0},
        ],
    }


@pytest.mark.parametrize(
    ("target", "met"),
    [(at_most(2.0), True), (at_most(1.99), False), (at_least(2.0), True), (at_least(2.01), False), (None, None)],
)
def test_a_bound_belongs_to_what_keeps_it(target: figures.Target | None, met: bool | None) -> None:
    assert evaluate(spec(target=target, against=()), "a", MEASURED).met is met


def test_a_ratio_of_rates_is_still_a_ratio_of_costs() -> None:
    measured = {"ours": series((500.0,), unit="steps/s"), "slow": series((5.0,), role=Role.PEER, unit="steps/s")}
    (comparison,) = evaluate(spec(against=("slow",)), "a", measured).comparisons
    assert comparison.ratio == 100.0


def test_a_figure_can_be_a_paired_ratio() -> None:
    assert evaluate(spec(value=ratio("peer", "ours"), unit="x", against=()), "a", MEASURED).value == 100.0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0000216, "s", "21.6 µs"),
        (0.00104, "s", "1.04 ms"),
        (0.1234, "s", "123 ms"),
        (18.24, "s", "18.2 s"),
        (1234.5, "steps/s", "1234 steps/s"),
        (6_160_000, "bytes", "6.16 MB"),
        (1.004, "x", "1.00x"),
        (565.4, "x", "565x"),
        (0.025, "share", "2.5%"),
    ],
)
def test_numbers_are_shown_at_a_readable_scale(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


# ---------------------------------------------------------------------------------------------------------------------- report
def report(**changes: Any) -> Report:
    missed = evaluate(spec(name="a-b", title="b | c", target=at_most(1.0)), "a", MEASURED)
    values: dict[str, Any] = {
        "started_at": "2026-01-02T03:04:05+00:00",
        "options": {},
        "machine": facts.machine_facts(),
        "versions": facts.versions(),
        "load_before": [0.1, 0.2, 0.3],
        "load_after": [1.0, 0.5, 0.4],
        "figures": [evaluate(spec(), "a", MEASURED), missed],
        "measured": {"a": MEASURED},
        "failures": [Failure("z", "SandboxDied: gone")],
    }
    return Report(**{**values, **changes})


def test_the_report_has_every_series_and_figure_in_its_json() -> None:
    said = json.loads(report().to_json())
    assert set(said) == {
        *("schema_version", "started_at", "seconds", "options", "machine", "versions", "load_average", "figures", "series", "failures")
    }
    assert [figure["met"] for figure in said["figures"]] == [True, False]
    assert said["series"]["a"]["peer"]["count"] == 2
    assert said["failures"] == [{"benchmark": "z", "reason": "SandboxDied: gone"}]
    assert said["load_average"] == {"before": [0.1, 0.2, 0.3], "after": [1.0, 0.5, 0.4]}


def test_the_markdown_table_has_a_row_for_each_figure() -> None:
    headline, _, *rows, _, failed = report().to_markdown().splitlines()
    assert "load average 0.1 before, 1.0 after" in headline
    assert rows[2] == "| a: true | 2.00 s | <= 2.00 s | yes | floor 1.00 s (T1 2.00x); peer 200 s (100x T1) |"
    assert rows[3].startswith(r"| b \| c | 2.00 s | <= 1.00 s | NO |")
    assert "`z` failed: SandboxDied: gone" in failed


def test_facts_do_not_name_the_machine_or_its_user() -> None:
    found = facts.machine_facts()
    assert found["cpus"] >= 1
    assert found["memory_bytes"] > 1 << 20
    assert set(found) == {"system", "kernel", "architecture", "processor", "cpus", "memory_bytes", "virtual", "privileged"}
    versions = facts.versions({"nothing": ["/does/not/exist"], "shell": ["sh", "-c", "echo thing 12.34-x 5.6"]})
    assert versions["shell"] == "12.34"
    assert "nothing" not in versions
    assert {"t1-terminal", "python", "numpy"} <= set(versions)


# ---------------------------------------------------------------------------------------------------------------------- runner
class Watching:
    """Notes what a runner tells."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.failures: list[Failure | None] = []

    def begin(self, benchmark: Benchmark, number: int, total: int) -> Tick:
        self.begun.append((benchmark.name, number, total))
        return nothing

    def end(self, benchmark: Benchmark, seconds: float, failure: Failure | None) -> None:
        self.failures.append(failure)


def fake(name: str, error: Exception | None = None) -> Benchmark:
    def measure(tick: Tick) -> Measured:
        if error is not None:
            raise error
        tick(1.0)
        return {"ours": series((1.0,))}

    return Benchmark(name, "a fake", (spec(name=f"{name}-p50", against=()),), measure)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Benchmark]:
    chosen = [fake("x-one"), fake("x-two", MeasurementError("wrong\nanswer")), fake("x-three")]
    monkeypatch.setattr(runner, "collect", lambda options: chosen)
    return chosen


def test_one_failure_does_not_stop_the_others(fakes: list[Benchmark]) -> None:
    watching = Watching()
    found = runner.run(runner.BenchOptions(repeat=2), watching)
    assert [figure.spec.name for figure in found.figures] == ["x-one-p50", "x-three-p50"]
    assert found.failures == [Failure("x-two", "MeasurementError: wrong answer")]
    assert found.measured["x-one"]["ours"].values == [1.0, 1.0], "repeats are pooled"
    assert watching.begun == [("x-one", 1, 6), ("x-two", 2, 6), ("x-three", 3, 6), ("x-one", 4, 6), ("x-three", 6, 6)]
    assert [failure is not None for failure in watching.failures] == [False, True, False, False, False]


def test_a_defect_of_ours_is_not_reported_as_a_failed_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "collect", lambda options: [fake("x", KeyError("no"))])
    with pytest.raises(KeyError):
        runner.run(runner.BenchOptions(), Watching())


@pytest.mark.parametrize(("only", "names"), [((), "one two three"), (("x-t*",), "two three"), (("x-three", "x-one"), "one three")])
def test_benchmarks_are_chosen_by_name_or_glob(fakes: list[Benchmark], only: tuple[str, ...], names: str) -> None:
    assert [benchmark.name for benchmark in runner.choose(fakes, only)] == [f"x-{name}" for name in names.split()]


@pytest.mark.parametrize(("only", "message"), [("x-oen", "did you mean 'x-one'"), ("qqq*", "expected one of x-one, x-two, x-three")])
def test_a_name_that_matches_nothing_is_a_mistake(fakes: list[Benchmark], only: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runner.choose(fakes, ["x-one", only])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="'podman'"):
        runner.BenchOptions(sandboxes=("podman",))
    with pytest.raises(ConfigError, match="repeat"):
        runner.BenchOptions(repeat=0)


def everything() -> list[Benchmark]:
    return runner.collect(runner.BenchOptions(sandboxes=runner.SANDBOXES, peers=True))


def test_every_figure_is_defined_and_names_are_unique() -> None:
    names = [benchmark.name for benchmark in everything()]
    specs = [figure for benchmark in everything() for figure in benchmark.figures]
    assert len(set(names)) == len(names)
    assert len({figure.name for figure in specs}) == len(specs)
    for figure in specs:
        assert figure.definition.endswith(".")
        assert figure.unit in ("s", "steps/s", "bytes", "share", "x")


def test_the_targets_are_those_of_the_table_in_the_manual() -> None:
    targets = {figure.name: figure.target for benchmark in everything() for figure in benchmark.figures if figure.target is not None}
    expected = {
        "local-reset-p50": at_most(0.05),
        "local-true-p50": at_most(0.001),
        "local-true-p99": at_most(0.005),
        "local-output-p50": at_most(1.0),
        "local-verify-p50": at_most(0.060),
        "local-verify-unchanged-p50": at_most(0.002),
        "local-verify-upper-ratio": at_most(1.5),
        "local-turns-ratio": at_most(1.1),
        "local-turns-env-ratio": at_most(1.1),
        "local-fleet-bin-true": at_least(500.0),
        "local-fleet-true": at_least(500.0),
        "local-vector-step": at_least(500.0),
        "local-memory-pss": at_most(15e6),
        "peer-true-ratio": at_least(100.0),
        "peer-output-ratio": at_least(20.0),
    }
    if os.geteuid() != 0:
        del expected["local-memory-pss"]
    assert {name: target for name, target in targets.items() if name.startswith(("local", "peer"))} == expected


@pytest.mark.parametrize(("user", "figures"), [(0, ["pss", "rss", "available", "host"]), (1000, ["available"])])
def test_an_ordinary_user_gets_the_memory_figure_that_proc_shows_him(
    monkeypatch: pytest.MonkeyPatch, user: int, figures: list[str]
) -> None:
    monkeypatch.setattr(fleet.os, "geteuid", lambda: user)
    benchmark = next(b for b in fleet.benchmarks(TINY) if b.name == "local-memory")
    assert [figure.of for figure in benchmark.figures] == figures


# ----------------------------------------------------------------------------------------------------------------------- turns
def test_turns_3_and_300_are_what_is_measured() -> None:
    played: list[int] = []

    @contextlib.contextmanager
    def episode() -> Iterator[Any]:
        index = len(played)
        played.append(0)

        def turn() -> None:
            played[index] += 1
            log.append((index, played[index]))

        yield turn

    log: list[tuple[int, int]] = []
    early, late = turns.age_pair(episode, random.Random(1))
    assert (len(early), len(late)) == (turns.SPAN, turns.SPAN)
    measured = log[-2 * turns.SPAN :]
    assert {turn for index, turn in measured if index == 0} == set(range(3, 8))
    assert {turn for index, turn in measured if index == 1} == set(range(300, 305))
    for pair in range(turns.SPAN):
        assert {index for index, _ in measured[2 * pair : 2 * pair + 2]} == {0, 1}, "in alternation"


# ----------------------------------------------------------------------------------------------------------------------- peers
def test_peers_that_are_not_installed_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swerex", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyMissing, match="python -m pip install swe-rex"):
        peers.require_peers()


def test_the_quick_run_of_a_quadratic_peer_is_smaller_and_has_no_target() -> None:
    full, quick = (next(b for b in peers.benchmarks(s) if b.name == "peer-output").figures[0] for s in (Settings(), Settings(fraction=0.1)))
    assert "head -c 10000000" in full.definition
    assert full.target == at_least(20.0)
    assert "head -c 1000000`" in quick.definition
    assert quick.target is None


class FakeRex(types.ModuleType):
    """Stands in for SWE-ReX: answers as its local deployment does."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__("fake")
        self.exit_code = exit_code
        self.log: list[str] = []

    def CreateBashSessionRequest(self) -> str:
        return "session"

    def BashAction(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def LocalDeployment(self) -> FakeRex:
        return self

    @property
    def runtime(self) -> FakeRex:
        return self

    async def start(self) -> None:
        self.log.append("start")

    async def stop(self) -> None:
        self.log.append("stop")

    async def create_session(self, request: str) -> None:
        self.log.append(request)

    async def run_in_session(self, action: dict[str, Any]) -> types.SimpleNamespace:
        self.log.append(action["command"])
        return types.SimpleNamespace(exit_code=self.exit_code, output="out")


def test_a_peer_that_loses_a_status_is_measured_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: FakeRex(None))
    with peers.RexShell() as shell:
        assert [shell.run("true"), shell.run("true")] == ["out", "out"]
        assert shell.lost_status == 2


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_peer_is_started_asked_and_stopped(monkeypatch: pytest.MonkeyPatch, exit_code: int) -> None:
    rex = FakeRex(exit_code)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: rex)
    with contextlib.ExitStack() as stack:
        if exit_code:
            stack.enter_context(pytest.raises(MeasurementError, match="ended with status 1"))
        with peers.RexShell() as shell:
            assert shell.run("true") == "out"
    assert rex.log == ["start", "session", "true", "stop"]


def test_a_peer_may_not_log_while_it_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    with peers.quiet():
        logging.getLogger("rex").critical("slow")
    logging.getLogger("rex").critical("heard")
    assert [record.message for record in caplog.records] == ["heard"]


# ---------------------------------------------------------------------------------------------------------------- the real thing
@pytest.fixture
def t1_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(["bench", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize("module", [local, fleet, verify], ids=["local", "fleet", "verify"])
@needs_namespaces
def test_every_benchmark_measures_what_its_figures_need(module: Any) -> None:
    for benchmark in module.benchmarks(TINY):
        told: list[float] = []
        measured = benchmark.run(told.append)
        assert told[-1] == 1.0
        for figure_spec in benchmark.figures:
            figure = evaluate(figure_spec, benchmark.name, measured)
            assert np.isfinite(figure.value), figure
            assert [comparison.name for comparison in figure.comparisons] == list(figure_spec.against)
        for name, one in measured.items():
            assert one.as_dict()["count"] >= 1, name
            assert name in {"host", "available"} or min(one.values) > 0, name


# ---------------------------------------------------------------------------------------------------------------- verification
def test_the_group_verify_is_what_measures_verification(t1_env: Any) -> None:
    status, out, err = t1_env("verify", "--list", "--sandbox", "local", "--sandbox", "docker")
    assert status == 0, err
    listed = [line.partition(":")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert listed == ["local-verify", "local-verify-upper", "local-verify-async", "docker-verify"]
    assert "local-verify-conformance" in t1_env("verify", "--conformance", "--list")[1]
    status, _, err = t1_env("--conformance", "--list")
    assert status == 2
    assert "t1-env bench verify --conformance" in err


def test_containers_need_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("T1_DOCKER_IMAGE", raising=False)
    with pytest.raises(MeasurementError, match="--docker-image"):
        verify.docker_benchmarks(TINY)[0].run(nothing)


@needs_namespaces
def test_verifiers_that_do_not_all_pass_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_PREPARE", verify._PREPARE[:-1])
    with verify.ten_tests() as task, pytest.raises(MeasurementError, match="8 of the 10"), verify.open_env(task):
        pass


@needs_namespaces
def test_a_pytest_that_does_not_pass_is_not_measured() -> None:
    with verify.ten_tests() as task, verify._pytest(task) as cold, pytest.raises(MeasurementError, match="pytest ended with status"):
        cold([], T1_BENCH_ROOT="/nonexistent")


def test_the_agents_of_the_comparison() -> None:
    task = resolve_tasks("seeds/harvest-totals").sample(0)
    steps = list(task.oracle_steps())
    half = conformance.scripts(task)["half-oracle"]
    assert conformance.scripts(task) == {"oracle": [*steps, Submit()], "no-op": [Submit()], "half-oracle": half}
    assert 0 < len(half) - 1 < len(steps)
    assert half == [*steps[: len(half) - 1], Submit()]


@needs_namespaces
def test_the_fast_road_and_the_script_are_compared() -> None:
    assert list(conformance.compare(resolve_tasks("seeds/hello-file").sample(0))) == [(agent, None) for agent in conformance.AGENTS]


@needs_namespaces
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("pytest --deselect test_it.py::test_b -rA $(dirname $0)", "disagrees: test_it.py::test_b"),
        ("echo 0 > /logs/verifier/reward.txt", "names no single tests: it left reward.txt"),
        ("true", "no_verdict"),
    ],
)
def test_a_script_that_says_something_else_is_a_disagreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, said: str
) -> None:
    for name, text in {
        "instruction.md": "Nothing.",
        "task.toml": "",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "solution/solve.sh": "touch a\n",
        "tests/test_it.py": "from pathlib import Path\ndef test_a(): assert Path('a').exists()\ndef test_b(): assert Path('a').exists()\n",
        "tests/test.sh": f"#!/bin/bash\n{script}\n",
    }.items():
        (tmp_path / "odd" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "odd" / name).write_text(text)
    monkeypatch.setattr(conformance, "list_tasks", lambda: (str(tmp_path / "odd"),))
    benchmark = next(b for b in verify.benchmarks(CONFORMANCE) if b.name == "local-verify-conformance")
    with caplog.at_level(logging.WARNING, logger="t1_env.bench.conformance"):
        figure = evaluate(benchmark.figures[0], benchmark.name, benchmark.run(nothing))
    assert figure.value < 1.0
    assert figure.met is False
    assert said in caplog.text


@pytest.mark.parametrize("episode", [turns.session_episode, lambda: turns.env_episode("seeds/hello-file")], ids=["session", "env"])
@needs_namespaces
def test_turns_of_real_episodes_can_be_played(episode: turns.Episode) -> None:
    with episode() as turn:
        for _ in range(3):
            turn()


@needs_namespaces
def test_a_step_that_is_not_what_it_is_called_is_not_measured() -> None:
    with local.open_env("seeds/hello-file") as env:
        with pytest.raises(MeasurementError, match="ran no verifiers"):
            local.step_checked(env, "true", verified=True)
        with pytest.raises(MeasurementError, match="ran the verifiers"):
            local.step_checked(env, "touch new", verified=False)
        with pytest.raises(MeasurementError, match="ended with status 3"):
            local.step_checked(env, "(exit 3)", verified=False)


@needs_namespaces
def test_a_command_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t1_env.bench.shells._LINE", "$(exit 1")
    benchmark = next(b for b in local.benchmarks(TINY) if b.name == "local-output")
    with pytest.raises(MeasurementError, match="ended with status"):
        benchmark.run(nothing)


@needs_namespaces
def test_the_command_prints_a_table_and_writes_what_was_asked(t1_env: Any, tmp_path: Path) -> None:
    status, out, err = t1_env(
        "--quick",
        "--only",
        "local-clone",
        "--only",
        "local-tru*",
        "--json",
        str(tmp_path / "b.json"),
        "--out",
        str(tmp_path / "new" / "dir"),
    )
    assert status == 0, err
    assert "[1/2] local-true" in err
    for word in ("figure", "target", "`true`, p50", "verification clone", "raw pty", "targets met"):
        assert word in out
    said = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert [figure["benchmark"] for figure in said["figures"]] == ["local-true"] * 4 + ["local-clone"]
    assert said["series"]["local-true"]["true"]["count"] == 5 * 40
    assert said["options"]["only"] == ["local-clone", "local-tru*"]
    assert sorted(path.suffix for path in (tmp_path / "new" / "dir").iterdir()) == [".json", ".md"]


@pytest.mark.parametrize(("strict", "limit", "expected"), [(False, 0.0, 0), (True, 0.0, 1), (True, 1e9, 0)])
def test_targets_decide_the_status_only_when_strict(
    t1_env: Any, monkeypatch: pytest.MonkeyPatch, strict: bool, limit: float, expected: int
) -> None:
    one = Benchmark("x", "a fake", (spec(target=at_most(limit), against=()),), lambda tick: {"ours": series((1.0,))})
    monkeypatch.setattr(runner, "collect", lambda options: [one])
    status, out, _ = t1_env(*(["--strict"] if strict else []))
    assert status == expected
    assert f"{int(limit > 0)} of 1 targets met" in out


def test_a_failed_benchmark_fails_the_command(t1_env: Any, fakes: list[Benchmark]) -> None:
    status, out, err = t1_env()
    assert status == 1
    assert "x-two failed after" in err
    assert "2 of 2 targets met" in out


def test_a_list_measures_nothing(t1_env: Any) -> None:
    status, out, _ = t1_env("--list", "--sandbox", "local", "--sandbox", "docker", "--sandbox", "ssh", "--peers")
    assert status == 0
    for benchmark in everything():
        assert f"{benchmark.name}: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "local-ture"], "did you mean 'local-true'"),
        (["--only", "docker-true"], "with these sandboxes and peers"),
        (["--sandbox", "podman"], "invalid choice"),
        (["--task", "seeds/nothing"], "seeds/nothing"),
        (["--repeat", "0"], "not an integer of at least 1"),
        (["--fleet", "-3"], "not an integer"),
        (["--json", "/does/not/exist/b.json"], "in a directory that exists"),
        (["--out", "/dev/null/x"], "not a directory"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(t1_env: Any, arguments: list[str], message: str) -> None:
    status, out, err = t1_env(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_errors_are_those_of_t1() -> None:
    assert issubclass(MeasurementError, T1Error)


def test_what_a_peer_raises_is_its_own_failure_and_ours_stay_what_they_are() -> None:
    with pytest.raises(MeasurementError, match="rex raised KeyError: 'gone'"), third_party("rex"):
        raise KeyError("gone")
    with pytest.raises(ConfigError), third_party("rex"):
        raise ConfigError("ours")
    with pytest.raises(KeyboardInterrupt), third_party("rex"):
        raise KeyboardInterrupt
