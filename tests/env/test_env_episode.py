"""What TerminalEnv decides, on a scripted machine: when verifiers run, what is paid, why an episode ends, what counts as a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import t1_env.env as env_module
from t1_env import EnvConfig, TerminalEnv
from t1_env.errors import ConfigError, SandboxDied, SandboxUnavailable, ShellError, UnknownTask, VerifierError
from t1_env.protocol import INFO_KEYS, SHELL_STATES, Command, Keys, ShellState, Submit, VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.reward import RewardInput
from t1_env.shell import ShellResult
from t1_env.timing import Stopwatch
from t1_env.verifiers.verbatim import Settlement

TASK = "seeds/hello-file"
RESULT = ShellResult(
    output="", output_bytes=0, elided_bytes=0, exit_code=0, state=ShellState.IDLE, cwd="/app", timed_out=False, seconds=0.0
)


def report(passed: int, total: int = 3, infra_error: str | None = None) -> VerifierReport:
    status = {True: VerifierOutcome(VerifierStatus.PASSED), False: VerifierOutcome(VerifierStatus.FAILED)}
    outcomes = {} if infra_error else {f"test_{index}": status[index < passed] for index in range(total)}
    return VerifierReport(outcomes=outcomes, infra_error=infra_error)


@dataclass
class Script:
    """How scripted machines behave; shared by all that an environment makes."""

    passed: int = 0
    changed: bool = True
    verify_error: str | None = None
    act: Callable[[str], ShellResult] = lambda text: replace(RESULT, output=f"ran {text}", output_bytes=len(text))
    start_errors: list[Exception] = field(default_factory=list)
    tampered: tuple[str, ...] = ()
    settled: Callable[[VerifierReport], Settlement] = lambda fast: Settlement(fast, True, source="ctrf")
    verifications: int = 0
    machines: list[Any] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def open_machines(self) -> int:
        return sum(not machine.closed for machine in self.machines)


class ScriptedMachine:
    script: Script
    cwd = "/app"

    incidents = ()
    verifies_at_the_end_only = False

    def __init__(self, task: Any, factory: Any, shell: Any, *, verify_retries: int, confirm: bool) -> None:
        self.task, self.closed = task, False
        self.sandbox = SimpleNamespace(isolation="namespaces", alive=True)
        self.session = self
        self.script.machines.append(self)

    def start(self, watch: Stopwatch) -> VerifierReport:
        if self.script.start_errors:
            raise self.script.start_errors.pop(0)
        return report(self.script.passed)

    def screen(self) -> np.ndarray[Any, Any]:
        return np.full((24, 80), ord("x"), dtype=np.uint32)

    def run(self, text: str, timeout_s: float | None = None) -> ShellResult:
        self.script.calls.append((text, timeout_s))
        return self.script.act(text)

    def keys(self, text: str, wait_s: float) -> ShellResult:
        self.script.calls.append(("keys", text, wait_s))
        return self.script.act(text)

    def verify(self, watch: Stopwatch, previous: VerifierReport) -> VerifierReport:
        self.script.verifications += 1
        with watch.phase("verify"):
            return report(self.script.passed, infra_error=self.script.verify_error)

    def settle(self, fast: VerifierReport, watch: Stopwatch) -> Settlement:
        self.script.calls.append(("settle", fast.passed))
        return self.script.settled(fast)

    def changed(self, watch: Stopwatch) -> bool:
        return self.script.changed

    def tampered(self, watch: Stopwatch) -> tuple[str, ...]:
        return self.script.tampered

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    script = Script()
    monkeypatch.setattr(env_module, "Machine", type("Machine", (ScriptedMachine,), {"script": script}))
    yield script
    assert script.open_machines <= 1, "an environment has at most one machine"


def make(**kwargs: Any) -> TerminalEnv:
    return TerminalEnv(task=kwargs.pop("task", TASK), **kwargs)


# ------------------------------------------------------------------------------------------------------------------- contract
def test_reset_and_step_hand_out_every_part(script: Script) -> None:
    env = make()
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space
    assert tuple(info) == INFO_KEYS
    assert observation["output"] == info["instruction"]
    assert info["task_id"] == TASK
    assert (info["verifiers_passed"], info["verifiers_total"], info["end_reason"], info["infra_error"]) == (0, 3, None, None)
    script.passed = 2
    observation, reward, terminated, truncated, info = env.step("make")
    assert observation in env.observation_space
    assert tuple(info) == INFO_KEYS
    assert (reward, terminated, truncated) == (2.0, False, False)
    assert info["verifiers"] == {"test_0": True, "test_1": True, "test_2": False}
    assert sum(info["reward_terms"].values()) == reward
    assert (int(observation["turn"]), int(observation["exit_code"]), observation["output"]) == (1, 0, "ran make")
    assert "verifiers" not in str(observation["output"])


def test_every_form_of_action(script: Script) -> None:
    env = make(step_timeout_s=7)
    env.reset(seed=0)
    env.step("plain")
    env.step(Command("timed", 2.5))
    env.step(Command("default"))
    env.step(Keys("C-c", 0.25))
    assert script.calls == [("plain", 7), ("timed", 2.5), ("default", 7), ("keys", "C-c", 0.25)]
    _, _, terminated, truncated, info = env.step(Submit())
    assert (terminated, truncated, info["end_reason"]) == (True, False, "submitted")
    assert script.calls[4:] == [("settle", 0)]


@pytest.mark.parametrize("action", [None, 3, b"ls", ["ls"], Command(None), "x" * (2**20 + 1)])  # type: ignore[arg-type]
def test_what_is_no_action_is_refused_and_costs_nothing(script: Script, action: Any) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(gym.error.InvalidAction):
        env.step(action)
    assert int(env.step("ls")[0]["turn"]) == 1


def test_lone_surrogates_from_a_model_are_replaced(script: Script) -> None:
    env = make()
    env.reset(seed=0)
    script.act = lambda text: replace(RESULT, output="\ud800", cwd="/\udce9")
    observation = env.step("echo \ud800")[0]
    assert observation in env.observation_space
    assert script.calls[0][0] == "echo ?"


def test_stepping_needs_an_episode(script: Script) -> None:
    env = make()
    with pytest.raises(gym.error.ResetNeeded, match="reset"):
        env.step("ls")
    env.reset(seed=0)
    env.step(Submit())
    with pytest.raises(gym.error.ResetNeeded, match="submitted"):
        env.step("ls")
    env.reset()
    env.step("ls")
    env.close()
    with pytest.raises(gym.error.ResetNeeded, match="closed"):
        env.step("ls")


# --------------------------------------------------------------------------------------------------------------- verification
def test_verifiers_run_only_after_a_change(script: Script) -> None:
    env = make()
    env.reset(seed=0)
    script.changed = False
    env.step("ls")
    assert script.verifications == 0
    env.step(Submit())
    assert script.verifications == 0
    env.reset()
    script.changed = True
    env.step("touch x")
    assert script.verifications == 1


def test_verify_every_step(script: Script) -> None:
    env = make(verify="step")
    env.reset(seed=0)
    script.changed = False
    env.step("ls")
    assert script.verifications == 1


@pytest.mark.parametrize("last", [Submit(), "the last turn"])
def test_verify_at_the_end_only(script: Script, last: Any) -> None:
    env = make(verify="end", max_turns=3)
    env.reset(seed=0)
    script.passed = 2
    assert [env.step("a")[1], env.step("b")[1]] == [0.0, 0.0]
    assert script.verifications == 0
    _, reward, _, _, info = env.step(last)
    assert script.verifications == 1
    assert (reward, info["verifiers_passed"]) == (2.0, 2)


def test_verify_at_the_end_does_not_miss_a_time_limit(script: Script) -> None:
    env = make(verify="end", time_limit_s=0.9)
    env.reset(seed=0)
    script.passed = 1
    assert env.step("within a second of the limit")[1] == 1.0


# ------------------------------------------------------------------------------------------------------------- the task's own script
NOT_RUN = {"verdict": "not_run", "source": "", "note": ""}


@pytest.mark.parametrize("last", [Submit(), "solve", "turn limit"])
def test_the_script_speaks_once_at_the_end(script: Script, last: Any) -> None:
    env = make(max_turns=2)
    assert env.reset(seed=0)[1]["verbatim"] == NOT_RUN
    script.passed = 1
    assert env.step("a")[4]["verbatim"] == NOT_RUN
    script.passed = 3 if last == "solve" else 2
    info = env.step(last)[4]
    assert info["verbatim"] == {"verdict": "agrees", "source": "ctrf", "note": ""}
    assert info["verifier_source"] == "runner"
    assert [call for call in script.calls if call[0] == "settle"] == [("settle", script.passed)]
    assert env.reset()[1]["verbatim"] == NOT_RUN


@pytest.mark.parametrize(
    ("mode", "rewards"), [("delta", [2.0, -1.0]), ("level", [2.0, 1.0]), ("final", [0.0, 1.0]), ("solved", [0.0, 0.0])]
)
def test_where_the_script_disagrees_the_lower_count_is_paid(script: Script, mode: str, rewards: list[float]) -> None:
    env = make(reward=mode)
    env.reset(seed=0)
    lower = replace(report(1), source="ctrf")
    script.settled = lambda fast: Settlement(lower, False, ("test_1: no", "test_2: no"), source="ctrf")
    script.passed = 2
    got = [env.step("a")[1]]
    script.passed = 3
    _, reward, terminated, _, info = env.step("b")
    assert [*got, reward] == rewards
    assert sum(info["reward_terms"].values()) == reward
    assert (terminated, info["end_reason"], info["verifiers_passed"], info["verifier_source"]) == (True, "solved", 1, "ctrf")
    assert info["verifiers"] == {"test_0": True, "test_1": False, "test_2": False}
    assert info["verbatim"] == {"verdict": "disagrees", "source": "ctrf", "note": "test_1: no; test_2: no"}


def test_without_a_verdict_of_the_script_the_verifiers_stand(script: Script) -> None:
    def gone(fast: VerifierReport) -> Settlement:
        raise SandboxDied("gone")

    env = make()
    for settled, verdict, note in (
        (lambda fast: Settlement(fast, None, note="no bash"), "no_verdict", "no bash"),
        (lambda fast: Settlement(fast, None, note="clone failed", failed=True), "infra_failure", "clone failed"),
        (gone, "infra_failure", "SandboxDied: gone"),
        (lambda fast: Settlement(fast, None, note="x" * 10_000), "no_verdict", "x" * 2000),
    ):
        script.passed, script.settled = 0, settled
        env.reset(seed=0)
        script.passed = 3
        _, reward, terminated, _, info = env.step("solve")
        assert (reward, terminated, info["end_reason"], info["infra_error"]) == (3.0, True, "solved", None)
        assert info["verbatim"] == {"verdict": verdict, "source": "", "note": note}


def test_the_script_can_be_switched_off_and_is_not_run_after_an_infrastructure_failure(script: Script) -> None:
    env = make(verbatim=False)
    env.reset(seed=0)
    assert env.step(Submit())[4]["verbatim"] == NOT_RUN
    env = make()
    env.reset(seed=0)
    script.act = dies
    info = env.step("bad")[4]
    assert (info["end_reason"], info["verbatim"]) == ("infra_failure", NOT_RUN)
    assert not [call for call in script.calls if call[0] == "settle"]


# ---------------------------------------------------------------------------------------------------------------- rewards, ends
@pytest.mark.parametrize(
    ("mode", "rewards"),
    [
        ("delta", [1.0, -1.0, 3.0]),
        ("level", [1.0, 0.0, 3.0]),
        ("final", [0.0, 0.0, 3.0]),
        ("solved", [0.0, 0.0, 1.0]),
        (lambda step: {"double": 2.0 * step.current.passed, "one": 1.0}, [3.0, 1.0, 7.0]),
    ],
)
def test_reward_modes(script: Script, mode: Any, rewards: list[float]) -> None:
    env = make(reward=mode)
    env.reset(seed=0)
    got = []
    for script.passed in (1, 0, 3):
        _, reward, terminated, _, info = env.step("step")
        assert sum(info["reward_terms"].values()) == reward
        got.append(reward)
    assert got == rewards
    assert terminated
    assert info["end_reason"] == "solved"


def test_potential_based_form(script: Script) -> None:
    env = make(gamma=0.5)
    env.reset(seed=0)
    got = []
    for script.passed in (1, 1, 3):
        got.append(env.step("step")[1])
    discounted = sum(0.5**t * r for t, r in enumerate(got))
    assert discounted == pytest.approx(0.5**3 * 3)


def test_a_reward_may_see_why_the_episode_ended(script: Script) -> None:
    seen: list[RewardInput] = []

    def reward(step: RewardInput) -> float:
        seen.append(step)
        return 0.0

    env = make(reward=reward)
    env.reset(seed=0)
    env.step("ls")
    env.step(Submit())
    assert [step.end_reason for step in seen] == [None, "submitted"]


def test_solving_goes_on_when_asked_to(script: Script) -> None:
    env = make(end_on_solved=False)
    env.reset(seed=0)
    script.passed = 3
    _, reward, terminated, truncated, _ = env.step("solve")
    assert (reward, terminated, truncated) == (3.0, False, False)
    script.passed = 2
    assert env.step("undo")[1] == -1.0


def test_turn_limit_truncates_and_solving_on_the_last_turn_terminates(script: Script) -> None:
    env = make(max_turns=2)
    env.reset(seed=0)
    env.step("a")
    _, _, terminated, truncated, info = env.step("b")
    assert (terminated, truncated, info["end_reason"]) == (False, True, "turn_limit")
    env.reset()
    env.step("a")
    script.passed = 3
    _, _, terminated, truncated, info = env.step("b")
    assert (terminated, truncated, info["end_reason"]) == (True, False, "solved")


def test_byte_limit(script: Script) -> None:
    env = make(byte_limit=10)
    env.reset(seed=0)
    script.act = lambda text: replace(RESULT, output_bytes=6)
    assert not env.step("a")[3]
    _, _, _, truncated, info = env.step("b")
    assert (truncated, info["end_reason"]) == (True, "byte_limit")


def test_time_limit_also_bounds_the_command(script: Script) -> None:
    env = make(time_limit_s=3600)
    env.reset(seed=0)
    env.step(Command("sleep", 10_000))
    assert 3000 < script.calls[0][1] <= 3600


def test_a_task_that_is_solved_untouched_pays_nothing(script: Script) -> None:
    script.passed = 3
    env = make()
    env.reset(seed=0)
    script.changed = False
    _, reward, terminated, _, info = env.step("ls")
    assert (reward, terminated, info["end_reason"]) == (0.0, True, "solved")


# --------------------------------------------------------------------------------------------------------------- infrastructure
def dies(_: str) -> ShellResult:
    raise SandboxDied("gone")


def loses_its_shell(_: str) -> ShellResult:
    raise ShellError("no shell")


@pytest.mark.parametrize(
    ("act", "verify_error", "message"),
    [
        (dies, None, "SandboxDied: gone"),
        (loses_its_shell, None, "ShellError: no shell"),
        (lambda text: replace(RESULT, state=ShellState.SANDBOX_DEAD), None, "the sandbox ended during this step"),
        (lambda text: RESULT, "clone failed", "clone failed"),
    ],
)
def test_infrastructure_failures_are_marked_and_pay_nothing(script: Script, act: Any, verify_error: str | None, message: str) -> None:
    env = make(reward="level")
    env.reset(seed=0)
    script.passed = 2
    env.step("good")
    script.passed, script.act, script.verify_error = 3, act, verify_error
    observation, reward, terminated, truncated, info = env.step("bad")
    assert (reward, terminated, truncated, info["end_reason"]) == (0.0, False, True, "infra_failure")
    assert message in info["infra_error"]
    assert sum(info["reward_terms"].values()) == 0.0
    assert info["verifiers_passed"] == 2
    assert observation in env.observation_space
    assert SHELL_STATES[observation["state"]] is ShellState.SANDBOX_DEAD
    assert info["state"] == "sandbox_dead"
    assert script.open_machines == 0
    with pytest.raises(gym.error.ResetNeeded, match="infra_failure"):
        env.step("more")
    script.passed, script.act, script.verify_error = 0, lambda text: RESULT, None
    assert env.reset()[1]["infra_error"] is None
    assert env.step("again")[4]["end_reason"] is None


def test_submitting_into_a_dead_sandbox_is_an_infrastructure_failure(script: Script) -> None:
    env = make()
    env.reset(seed=0)
    script.verify_error = "dead"
    _, reward, terminated, truncated, info = env.step(Submit())
    assert (reward, terminated, truncated, info["end_reason"]) == (0.0, False, True, "infra_failure")


def test_our_own_bugs_are_not_hidden_as_infrastructure(script: Script) -> None:
    def bug(_: str) -> ShellResult:
        raise KeyError("bug")

    env = make()
    env.reset(seed=0)
    script.act = bug
    with pytest.raises(KeyError):
        env.step("ls")


@pytest.mark.parametrize("error", [SandboxDied("flaky"), ShellError("flaky"), VerifierError("flaky")])
def test_a_flaky_reset_is_tried_again(script: Script, error: Exception) -> None:
    env = make(retries=2)
    script.start_errors = [error, error]
    env.reset(seed=0)
    assert len(script.machines) == 3
    assert script.open_machines == 1
    script.start_errors = [error] * 3
    with pytest.raises(type(error), match="flaky"):
        env.reset()
    assert script.open_machines == 0


@pytest.mark.parametrize("error", [SandboxUnavailable("no namespaces"), KeyboardInterrupt()])
def test_what_trying_again_cannot_help_is_raised_at_once(script: Script, error: Any) -> None:
    env = make(retries=5)
    script.start_errors = [error]
    with pytest.raises(type(error)):
        env.reset(seed=0)
    assert len(script.machines) == 1
    assert script.open_machines == 0


def test_changed_system_files_are_named_until_the_next_reset(script: Script) -> None:
    env = make()
    env.reset(seed=0)
    script.tampered = ("/usr/bin/python3",)
    assert env.step("cp evil /usr/bin/python3")[4]["tamper"] == ("/usr/bin/python3",)
    script.changed = False
    assert env.step("ls")[4]["tamper"] == ("/usr/bin/python3",)
    assert env.reset()[1]["tamper"] == ()


# ----------------------------------------------------------------------------------------------------------------------- tasks
def test_the_seed_picks_the_task_and_options_name_one(script: Script) -> None:
    family = "families/tidy-files?level=1"
    env = make(task=family)
    first = env.reset(seed=4)[1]["task_id"]
    following = [env.reset()[1]["task_id"] for _ in range(3)]
    assert env.reset(seed=4)[1]["task_id"] == first
    assert [env.reset()[1]["task_id"] for _ in range(3)] == following
    assert len({first, *following}) > 1
    assert env.reset(options={"task": TASK})[1]["task_id"] == TASK
    assert env.reset(options={"task": first})[1]["task_id"] == first
    assert env.task is not None
    assert env.reset(options={"task": env.task})[1]["task_id"] == first


@pytest.mark.parametrize("options", [{"tasks": TASK}, {"seed": 1}])
def test_unknown_options_are_refused_with_a_suggestion(script: Script, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="unknown reset option"):
        make().reset(options=options)


def test_unknown_tasks_are_refused_when_the_environment_is_made() -> None:
    with pytest.raises(UnknownTask, match="hello-file"):
        make(task="seeds/helo-file")


# ------------------------------------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turns": True}, "max_turns=True"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s=nan"),
        ({"step_timeout_s": "3"}, "step_timeout_s='3'"),
        ({"time_limit_s": -1}, "time_limit_s=-1"),
        ({"byte_limit": 0}, "byte_limit=0"),
        ({"gamma": 0}, "gamma=0"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"reward": "dleta"}, "did you mean 'delta'"),
        ({"reward": 3}, "reward=3"),
        ({"verify": "always"}, "verify='always'"),
        ({"verbatim": "never"}, "verbatim='never'"),
        ({"render_mode": "rgb_array"}, "render_mode='rgb_array'"),
        ({"sandbox": "lokal"}, "did you mean 'local'"),
        ({"sandbox": None}, "sandbox=None"),
        ({"rows": 1}, "rows=1"),
        ({"max_output_bytes": 5}, "max_output_bytes=5"),
        ({"retries": -1}, "retries=-1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    assert message in str(caught.value)


def test_every_argument_is_in_the_manual_and_in_the_config() -> None:
    manual = TerminalEnv.__doc__ or ""
    for name in EnvConfig.field_names():
        assert f"`{name}`" in manual
        assert hasattr(make().config, name)
    for key in INFO_KEYS:
        assert f"| `{key}` |" in manual


# ------------------------------------------------------------------------------------------------------------ timing, rendering
def test_timing_compares_equal_and_can_be_switched_off(script: Script) -> None:
    env = make()
    env.reset(seed=0)
    timing = env.step("ls")[4]["_timing"]
    assert timing["verify"] >= 0
    assert timing == env.step("ls")[4]["_timing"]
    silent = make(timing=False)
    silent.reset(seed=0)
    assert dict(silent.step("ls")[4]["_timing"]) == {}


def test_ansi_rendering_is_the_screen(script: Script) -> None:
    env = make(render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == "\n".join(["x" * 80] * 24)


def test_human_rendering_prints_what_happens(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    env = make(render_mode="human")
    _, info = env.reset(seed=0)
    env.step("ls")
    env.step(Submit())
    assert capsys.readouterr().out == f"{info['instruction'].strip()}\n$ ls\nran ls\n<submit>\n\n"
    assert env.render() is None


# --------------------------------------------------------------------------------------------------------------------- closing
def test_close_is_idempotent_and_the_context_manager_closes(script: Script) -> None:
    with make() as env:
        env.reset(seed=0)
    env.close()
    assert script.open_machines == 0
    env.reset(seed=0)
    env.reset(seed=0)
    assert script.open_machines == 1
    del env
    assert script.open_machines == 0


def test_an_environment_that_was_never_made_can_be_deleted() -> None:
    env = TerminalEnv.__new__(TerminalEnv)
    env.__del__()
