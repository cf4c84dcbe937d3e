"""When verifiers run, and late rewards: an episode whose verifiers run beside its caller pays what one that waits for them pays."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import t1_env.env as env_module
from t1_env import EnvConfig, TerminalEnv
from t1_env.errors import ConfigError, SandboxDied
from t1_env.protocol import INFO_KEYS, Keys, ShellState, Submit, VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.sandbox.local import unavailable_reason
from t1_env.shell import ShellResult
from t1_env.testing import Rollout, rollout
from t1_env.timing import Stopwatch
from t1_env.verification import PendingVerification
from t1_env.verifiers.verbatim import Settlement
from t1_env.wrappers import RecordEpisode, fold_late_rewards

TASK = "seeds/hello-file"
RESULT = ShellResult(
    output="", output_bytes=0, elided_bytes=0, exit_code=0, state=ShellState.IDLE, cwd="/app", timed_out=False, seconds=0.0
)
NOTHING_LATE = {"turn": 0, "reward": 0.0, "terms": {}, "verifiers_passed": 0}
needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]


def report(passed: Sequence[bool], **fields: Any) -> VerifierReport:
    status = {True: VerifierOutcome(VerifierStatus.PASSED), False: VerifierOutcome(VerifierStatus.FAILED)}
    return VerifierReport(outcomes={f"test_{index}": status[value] for index, value in enumerate(passed)}, **fields)


@dataclass
class World:
    """Scripted machines: a command such as ``"101"`` sets what passes (here the first and the third verifier)."""

    passed: tuple[bool, ...] = (False, False, False)
    changed: bool = False
    gate: threading.Event | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    executed: list[str] = field(default_factory=list)
    verifications: int = 0
    machines: list[ScriptedMachine] = field(default_factory=list)


class ScriptedMachine:
    world: World
    cwd = "/app"
    incidents = ()
    verifies_at_the_end_only = False

    def __init__(self, task: Any, factory: Any, shell: Any, *, verify_retries: int, confirm: bool) -> None:
        self.sandbox = SimpleNamespace(isolation="namespaces", alive=True)
        self.session = self
        self.closed = False
        self.world.machines.append(self)
        self.world.passed, self.world.changed = (False, False, False), False

    def start(self, watch: Stopwatch) -> VerifierReport:
        return report(self.world.passed)

    def screen(self) -> np.ndarray[Any, Any]:
        return np.zeros((24, 80), dtype=np.uint32)

    def run(self, text: str, timeout_s: float | None = None) -> ShellResult:
        self.world.executed.append(text)
        if text == "die":
            raise SandboxDied("gone")
        if text in ("break", "lose"):
            self.world.fields = {"infra_error": "no clone"} if text == "break" else {"lost": True}
        if set(text) <= {"0", "1"}:
            self.world.passed = tuple(digit == "1" for digit in text)
        self.world.changed |= text != "ls"
        return replace(RESULT, output_bytes=len(text))

    def _verify(self) -> VerifierReport:
        self.world.verifications += 1
        if self.world.gate is not None:
            assert self.world.gate.wait(60)
        if self.closed or self.world.fields.get("lost"):
            raise SandboxDied("the sandbox died while it was asked to 'clone'")
        if "infra_error" in self.world.fields:
            return VerifierReport(infra_error=self.world.fields["infra_error"])
        self.world.changed = False
        return report(self.world.passed, **self.world.fields)

    def verify(self, watch: Stopwatch, previous: VerifierReport) -> VerifierReport:
        with watch.phase("verify"):
            return self._verify()

    def verify_later(self, watch: Stopwatch, previous: VerifierReport) -> PendingVerification:
        return PendingVerification(self._verify)

    def settle(self, fast: VerifierReport, watch: Stopwatch) -> Settlement:
        return Settlement(fast, True, source="ctrf")

    def changed(self, watch: Stopwatch) -> bool:
        return self.world.changed

    def tampered(self, watch: Stopwatch) -> tuple[str, ...]:
        return ("/usr/bin/b",)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(env_module, "Machine", type("Machine", (ScriptedMachine,), {"world": world}))
    return world


def play(actions: Sequence[Any], **kwargs: Any) -> Rollout:
    env = TerminalEnv(TASK, **kwargs)
    try:
        episode = rollout(env, actions, seed=0)
        if episode.infos[-1]["reward_pending"]:
            episode.infos.append(env.collect_late_reward())
    finally:
        env.close()
    return episode


# --------------------------------------------------------------------------------------------------------------------- schedule
@pytest.mark.parametrize(
    ("verify", "due"),
    [
        ("step", [1, 2, 3, 4, 5, 6, 7]),
        ("change", [1, 2, 4, 5, 6]),
        ("end", [7]),
        (1, [1, 2, 4, 5, 6]),
        (2, [2, 4, 6]),
        (3, [3, 6]),
        (5, [5, 7]),
        (100, [7]),
    ],
)
def test_after_which_steps_verifiers_run(world: World, verify: Any, due: list[int]) -> None:
    """Steps 3 and 7 change nothing; what an earlier step changed is still to be verified then."""
    env = TerminalEnv(TASK, verify=verify, max_turns=7)
    env.reset(seed=0)
    ran = []
    for turn in range(1, 8):
        before = world.verifications
        env.step("ls" if turn in (3, 7) else "touch")
        if world.verifications > before:
            ran.append(turn)
    assert ran == due


def test_every_n_steps_pays_what_came_in_between(world: World) -> None:
    episode = play(["100", "110", "010", "ls", "011"], verify=3, max_turns=5)
    assert episode.rewards == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert [info["verifiers_passed"] for info in episode.infos] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("verify", [0, -1, 2.0, True, "steps", "", None, b"step"])
def test_what_is_no_schedule_is_refused(verify: Any) -> None:
    with pytest.raises(ConfigError, match="verify="):
        EnvConfig(verify=verify)


def test_a_slip_in_the_name_of_a_schedule_is_corrected() -> None:
    with pytest.raises(ConfigError, match=r"expected one of change, step, end, a number of steps \(did you mean 'step'\?\)"):
        EnvConfig(verify="stepp")


@pytest.mark.parametrize("name", ["verify_async", "confirm", "verbatim"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_switches_are_on_or_off(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        EnvConfig(**{name: value})


# ---------------------------------------------------------------------------------------------------------------------- flags
def test_what_the_report_flags_is_in_the_info(world: World) -> None:
    world.fields = {"unknown": ("test_9",), "tainted": ("test_0",), "flaky": ("test_1",), "masked": ("/usr/bin/a", "/usr/bin/b")}
    first, info = play(["100"]).infos
    assert [first[key] for key in ("unknown", "tainted", "flaky", "tamper")] == [()] * 4
    assert [info[key] for key in ("unknown", "tainted", "flaky", "tamper")] == [
        ("test_9",),
        ("test_0",),
        ("test_1",),
        ("/usr/bin/a", "/usr/bin/b"),
    ]


# ---------------------------------------------------------------------------------------------------------------- late rewards
def test_a_step_returns_while_its_verifiers_run_and_the_next_one_pays(world: World) -> None:
    world.gate = threading.Event()
    env = TerminalEnv(TASK, verify_async=True)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("110")
    assert (reward, terminated, truncated, int(observation["turn"])) == (0.0, False, False, 1)
    assert (info["reward_pending"], info["late_reward"], info["verifiers_passed"]) == (True, NOTHING_LATE, 0)
    assert (info["reward_terms"], info["action_executed"]) == ({"pending": 0.0}, True)
    world.gate.set()
    _, reward, _, _, info = env.step("ls")
    assert (reward, info["reward_pending"], info["verifiers_passed"]) == (2.0, False, 2)
    assert info["late_reward"] == {"turn": 1, "reward": 2.0, "terms": {"gained": 2.0, "lost": -0.0}, "verifiers_passed": 2}
    assert info["reward_terms"] == {"gained": 0.0, "lost": -0.0, "late": 2.0}
    assert {"wait", "late_verify"} <= set(info["_timing"])
    assert env.step("ls")[4]["late_reward"] == NOTHING_LATE
    env.close()


def test_the_next_action_waits_for_the_verifiers(world: World) -> None:
    world.gate = threading.Event()
    env = TerminalEnv(TASK, verify_async=True)
    env.reset(seed=0)
    env.step("110")
    stepping = threading.Thread(target=env.step, args=("000",))
    stepping.start()
    stepping.join(0.2)
    assert world.executed == ["110"], "nothing may run while the agent's files are verified"
    world.gate.set()
    stepping.join(60)
    assert world.executed == ["110", "000"]
    env.close()


@pytest.mark.parametrize("last", [Submit(), "111", "110"])
def test_the_last_step_waits(world: World, last: Any) -> None:
    episode = play(["100", last], verify_async=True, max_turns=2)
    assert episode.ended
    assert not episode.infos[-1]["reward_pending"]
    assert sum(episode.rewards) == {"111": 3.0, "110": 2.0}.get(str(last), 1.0)
    assert fold_late_rewards(episode.rewards, episode.infos) == play(["100", last], max_turns=2).rewards


def test_solving_is_seen_by_the_next_step_which_does_nothing_else(world: World) -> None:
    env = TerminalEnv(TASK, verify_async=True)
    env.reset(seed=0)
    observation, reward, terminated, _, _ = env.step("111")
    assert (reward, terminated) == (0.0, False)
    after, reward, terminated, truncated, info = env.step("000")
    assert (reward, terminated, truncated, info["end_reason"]) == (3.0, True, False, "solved")
    assert (info["action_executed"], info["verifiers_passed"], info["verbatim"]["verdict"]) == (False, 3, "agrees")
    assert (int(after["turn"]), after["output"]) == (int(observation["turn"]), "")
    assert after in env.observation_space
    assert tuple(info) == INFO_KEYS
    assert world.executed == ["111"]
    with pytest.raises(gym.error.ResetNeeded, match="solved"):
        env.step("ls")


def test_who_asks_before_the_next_step_needs_no_step_that_does_nothing(world: World) -> None:
    env = TerminalEnv(TASK, verify_async=True)
    with pytest.raises(gym.error.ResetNeeded):
        env.collect_late_reward()
    env.reset(seed=0)
    assert env.collect_late_reward()["late_reward"] == NOTHING_LATE
    env.step("100")
    assert env.collect_late_reward()["late_reward"]["reward"] == 1.0
    assert env.collect_late_reward()["late_reward"] == NOTHING_LATE
    assert env.step("ls")[1] == 0.0, "a reward is paid once"
    env.step("111")
    info = env.collect_late_reward()
    assert (info["late_reward"]["reward"], info["late_reward"]["turn"], info["end_reason"]) == (2.0, 3, "solved")
    with pytest.raises(gym.error.ResetNeeded, match="solved"):
        env.collect_late_reward()


@pytest.mark.parametrize(("action", "message"), [("break", "no clone"), ("lose", "SandboxDied")])
def test_a_failure_behind_the_back_of_the_caller_surfaces_at_the_next_step(world: World, action: str, message: str) -> None:
    env = TerminalEnv(TASK, verify_async=True, reward="level")
    env.reset(seed=0)
    env.step("100")
    _, reward, _, _, info = env.step(action)
    assert (reward, info["reward_pending"]) == (1.0, True)
    observation, reward, terminated, truncated, info = env.step("000")
    assert (reward, terminated, truncated, info["end_reason"]) == (0.0, False, True, "infra_failure")
    assert message in info["infra_error"]
    assert info["late_reward"] == {"turn": 2, "reward": 0.0, "terms": {"infra_failure": 0.0}, "verifiers_passed": 1}
    assert (info["action_executed"], info["verifiers_passed"], info["state"]) == (False, 1, "sandbox_dead")
    assert world.executed == ["100", action]
    assert world.machines[-1].closed
    assert observation in env.observation_space


def test_what_a_step_earned_is_paid_even_if_the_next_one_breaks_the_machine(world: World) -> None:
    episode = play(["110", "die"], verify_async=True)
    assert episode.rewards == [0.0, 2.0]
    assert episode.infos[-1]["end_reason"] == "infra_failure"
    assert fold_late_rewards(episode.rewards, episode.infos) == play(["110", "die"]).rewards == [2.0, 0.0]


def test_time_that_runs_out_during_a_step_does_not_hide_what_it_earned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_module, "_may_be_last", lambda episode, output_bytes: False)
    for command, reason in (("110", "turn_limit"), ("111", "solved"), ("break", "infra_failure")):
        episode = play([command], verify_async=True, max_turns=1)
        info = episode.infos[-1]
        assert (info["end_reason"], info["reward_pending"], info["late_reward"]) == (reason, False, NOTHING_LATE)
        assert episode.rewards == [float(command.count("1"))]
        world.fields = {}


@pytest.mark.parametrize("end", ["close", "reset", "forget"])
def test_ending_an_episode_whose_verifiers_still_run_is_safe(world: World, end: str) -> None:
    world.gate = threading.Event()
    env = TerminalEnv(TASK, verify_async=True)
    env.reset(seed=0)
    env.step("111")
    machine = world.machines[0]
    if end == "close":
        env.close()
        with pytest.raises(gym.error.ResetNeeded, match="closed"):
            env.step("ls")
    elif end == "reset":
        info = env.reset(seed=0)[1]
        assert (info["reward_pending"], info["late_reward"], info["verifiers_passed"]) == (False, NOTHING_LATE, 0)
        assert env.step("ls")[1] == 0.0
    else:
        del env
        gc.collect()
    assert machine.closed
    world.gate.set()


def test_transcripts_and_vectors_take_late_rewards(world: World, tmp_path: Any) -> None:
    env = RecordEpisode(TerminalEnv(TASK, verify_async=True), tmp_path)
    rollout(env, ["100", "110", Submit()], seed=0)
    env.close()
    assert env.last_path is not None
    assert '"late_reward": {"turn": 1, "reward": 1.0' in env.last_path.read_text()
    envs = gym.make_vec("t1_env:T1Terminal-v0", num_envs=1, task=TASK, verify_async=True)
    envs.reset(seed=0)
    assert envs.step(("100",))[4]["reward_pending"].tolist() == [True]
    _, rewards, _, _, infos = envs.step(("ls",))
    assert (rewards.tolist(), infos["late_reward"]["reward"].tolist(), infos["late_reward"]["turn"].tolist()) == ([1.0], [1.0], [1])
    envs.close()


# ------------------------------------------------------------------------------------------------- the same as without, always
words = st.one_of(
    st.tuples(*[st.sampled_from("01")] * 3).map("".join),
    st.sampled_from(["ls", "ls", "touch", "break", "lose", "die", Submit(), Keys("C-c")]),
)


class KeysToo(ScriptedMachine):
    def keys(self, text: str, wait_s: float) -> ShellResult:
        return self.run("touch")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(words, min_size=1, max_size=8),
    reward=st.sampled_from(["delta", "level", "final", "solved"]),
    gamma=st.sampled_from([None, 0.5]),
    verify=st.sampled_from(["change", "step", "end", 2]),
    end_on_solved=st.booleans(),
    max_turns=st.integers(1, 8),
)
def test_late_rewards_add_up_and_fold_to_those_of_an_episode_that_waits(
    monkeypatch: pytest.MonkeyPatch,
    actions: list[Any],
    reward: str,
    gamma: float | None,
    verify: Any,
    end_on_solved: bool,
    max_turns: int,
) -> None:
    played = []
    for verify_async in (False, True):
        world = World()
        with monkeypatch.context() as patch:
            patch.setattr(env_module, "Machine", type("Machine", (KeysToo,), {"world": world}))
            episode = play(
                actions,
                reward=reward,
                gamma=gamma,
                verify=verify,
                verify_async=verify_async,
                end_on_solved=end_on_solved,
                max_turns=max_turns,
            )
        for paid, info in zip(episode.rewards, episode.infos[1:], strict=False):
            assert paid == pytest.approx(sum(info["reward_terms"].values()))
        played.append((episode, world))
    (waiting, its_world), (late, other_world) = played
    assert fold_late_rewards(waiting.rewards, waiting.infos) == waiting.rewards
    assert fold_late_rewards(late.rewards, late.infos) == waiting.rewards
    last = late.infos[-1]
    trailing = last["reward_terms"].get("late", 0.0) if len(late.infos) == len(late.rewards) + 2 else 0.0
    assert sum(late.rewards) + trailing == pytest.approx(sum(waiting.rewards))
    assert other_world.executed == its_world.executed
    assert other_world.verifications == its_world.verifications
    for key in ("end_reason", "verifiers", "verbatim", "state"):
        assert last[key] == waiting.infos[-1][key]


def test_folding_wants_a_whole_episode(world: World) -> None:
    episode = play(["100", "110", "ls"], verify_async=True)
    assert fold_late_rewards(episode.rewards, episode.infos) == [1.0, 1.0, 0.0]
    assert fold_late_rewards(episode.rewards, episode.infos[1:]) == [1.0, 1.0, 0.0]
    assert fold_late_rewards([], episode.infos[:1]) == []
    with pytest.raises(ConfigError, match="one info for each reward"):
        fold_late_rewards(episode.rewards, episode.infos[:2])
    with pytest.raises(ConfigError, match="one whole episode"):
        fold_late_rewards(episode.rewards[1:], episode.infos[2:])


# ------------------------------------------------------------------------------------------------------------ on a real sandbox
@pytest.mark.parametrize("end", [pytest.param(end, marks=needs_namespaces) for end in ("close", "reset")])
def test_a_sandbox_whose_verifiers_still_run_ends_at_once(end: str, slow_task: Any) -> None:
    env = TerminalEnv(slow_task, verify_async=True, verbatim=False)
    env.reset(seed=0)
    assert env.step("echo > slow")[4]["reward_pending"]
    if end == "close":
        env.close()
        return
    env.reset(seed=0)
    env.step("echo done > done")
    assert env.collect_late_reward()["late_reward"]["reward"] == 1.0
    env.close()


@pytest.fixture
def slow_task(tmp_path: Any) -> Any:
    from t1_env.tasks import load_task

    for name, text in {
        "instruction.md": "Make the file done.",
        "task.toml": "[verifier]\ntimeout_sec = 600\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test_it.py": (
            "import time\nfrom pathlib import Path\n\n"
            "def test_slow():\n    while Path('slow').exists():\n        time.sleep(1)\n    assert Path('done').exists()\n\n"
            "def test_never(): assert False\n"
        ),
    }.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(tmp_path / "task")


SERVICE = """\
import socket

def test_answers():
    with socket.create_connection(("127.0.0.1", 8125), timeout=5) as client:
        assert client.recv(5) == b"hello"

def test_never(): assert False
"""
SERVER = """\
import socket
server = socket.socket(); server.bind(("127.0.0.1", 8125)); server.listen(); open("/tmp/ready", "w").close()
while True:
    client, _ = server.accept(); client.sendall(b"hello"); client.close()
"""


@pytest.mark.parametrize("verify_async", [pytest.param(value, marks=needs_namespaces) for value in (False, True)])
def test_a_server_that_ends_is_noticed_although_no_file_changes(slow_task: Any, verify_async: bool) -> None:
    from t1_env.tasks import load_task

    (slow_task.path / "tests/test_it.py").write_text(SERVICE)
    (slow_task.path / "environment/Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\nCOPY server.py ./\n")
    (slow_task.path / "environment/server.py").write_text(SERVER)
    env = TerminalEnv(load_task(slow_task.path), verify_async=verify_async, verbatim=False)
    try:
        started = "until test -e /tmp/ready; do kill -0 $! || break; sleep 0.1; done; jobs -r | grep -q server"
        start = f"python3 server.py > /dev/null 2>&1 & {started}"
        episode = rollout(env, [start, "true", "kill %1; wait %1", "true", Submit()], seed=0)
    finally:
        env.close()
    if episode.observations[1]["exit_code"] != 0:
        pytest.skip("no Python in the sandbox")
    assert fold_late_rewards(episode.rewards, episode.infos) == [1.0, 0.0, -1.0, 0.0, 0.0]


FLAKY = """\
import random
from pathlib import Path

def test_done(): assert Path('done').exists()
def test_flaky(): assert Path('flaky').exists() and Path('/proc/sys/kernel/random/uuid').read_text()[0] < FRACTION
def test_never(): assert False
"""


@pytest.mark.parametrize("verify_async", [pytest.param(value, marks=needs_namespaces) for value in (False, True)])
def test_what_passes_once_and_not_again_is_not_paid(slow_task: Any, verify_async: bool) -> None:
    from t1_env.tasks import load_task

    (slow_task.path / "tests/test_it.py").write_text(FLAKY.replace("FRACTION", "'8'"))
    env = TerminalEnv(load_task(slow_task.path), verify="step", verify_async=verify_async, confirm=True, verbatim=False)
    try:
        episode = rollout(env, ["touch done", "touch flaky", *["true"] * 40], seed=0)
        infos = [info for info in episode.infos if info["flaky"]]
    finally:
        env.close()
    assert infos, "a quarter of the runs: 1 in 100,000 such tests sees none of them in 40 steps"
    for info in infos:
        assert info["flaky"] == ("test_it.py::test_flaky",)
        assert (info["verifiers_passed"], info["verifiers"]["test_it.py::test_flaky"]) == (1, False)
    assert all(info["verifiers"]["test_it.py::test_done"] for info in episode.infos[3:])


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=needs_namespaces) for seed in (0, 1)])
def test_random_commands_earn_the_same_either_way(seed: int) -> None:
    generator = np.random.default_rng(seed)
    choices = ["echo 'Hello, world!' > /app/hello.txt", "ls", "rm -f /app/hello.txt", "touch x", "echo Hello > hello.txt", "mkdir -p y"]
    actions: list[Any] = [choices[index] for index in generator.integers(len(choices), size=8)]
    waiting, late = (
        play([*actions, Submit()], verify_async=verify_async, end_on_solved=bool(seed), verbatim=False) for verify_async in (False, True)
    )
    assert fold_late_rewards(late.rewards, late.infos) == waiting.rewards
    assert sum(late.rewards) == sum(waiting.rewards)
    assert late.infos[-1]["end_reason"] == waiting.infos[-1]["end_reason"]
