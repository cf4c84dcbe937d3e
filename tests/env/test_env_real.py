"""``gym.make("T1Terminal-v0")`` in real sandboxes: checkers, determinism, rewards, dead sandboxes, vector environments."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from t1_env import INFO_KEYS, Command, Keys, Submit, TerminalEnv, TerminalVectorEnv, load_task
from t1_env.sandbox.local import unavailable_reason
from t1_env.testing import assert_deterministic, oracle_actions, rollout
from t1_env.wrappers import HistoryWindow, RecordEpisode, TextObservation, make_sb3_env

pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]
HELLO = "seeds/hello-file"
RIGHT = "echo hi > hello.txt"


@pytest.fixture
def env() -> Iterator[gym.Env[Any, Any]]:
    made = gym.make("T1Terminal-v0", task=HELLO)
    yield made
    made.close()


# -------------------------------------------------------------------------------------------------------------------- checkers
def test_gymnasiums_checker_passes_without_a_warning(env: gym.Env[Any, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_the_registered_environment_passes_too(env: gym.Env[Any, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Gymnasium warns about every wrapped environment; nothing else may be said.
        warnings.filterwarnings("ignore", message=".*is different from the unwrapped version.*")
        check_env(env, skip_render_check=True, skip_close_check=True)


@pytest.mark.parametrize("wrap", [TextObservation, lambda env: HistoryWindow(TextObservation(env), turns=3)])
def test_text_wrappers_pass_the_checker(env: gym.Env[Any, Any], wrap: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*is different from the unwrapped version.*")
        check_env(wrap(env), skip_render_check=True, skip_close_check=True)


def test_stable_baselines_checker_passes_without_a_warning() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker", reason="stable-baselines3 is not installed")
    made = make_sb3_env(HELLO, [RIGHT, "ls"], max_turns=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(made, warn=True)
    made.close()


# --------------------------------------------------------------------------------------------------------------- whole episodes
def test_the_example_of_the_readme(env: gym.Env[Any, Any]) -> None:
    observation, info = env.reset(seed=0)
    assert "hello.txt" in observation["output"]
    assert (info["verifiers_passed"], info["verifiers_total"], info["isolation"]) == (0, 3, "namespaces")
    observation, reward, terminated, truncated, info = env.step(RIGHT)
    assert (reward, terminated, truncated) == (3.0, True, False)
    assert tuple(info) == INFO_KEYS
    assert all(info["verifiers"].values())
    assert (int(observation["exit_code"]), observation["cwd"], info["end_reason"]) == (0, "/app", "solved")
    assert info["verbatim"] == {"verdict": "agrees", "source": "pytest", "note": ""}
    assert {"command", "fingerprint", "verify", "verbatim"} <= set(info["_timing"])


def test_a_script_that_disagrees_lowers_the_return(tmp_path: Path) -> None:
    task = Path(shutil.copytree(load_task(HELLO).path, tmp_path / "task"))
    (task / "tests/test.sh").write_text("mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt\n")
    with TerminalEnv(task=str(task)) as env:
        episode = rollout(env, [RIGHT], seed=0)
        info = episode.infos[-1]
        assert (sum(episode.rewards), info["end_reason"], info["verifiers_passed"]) == (0.0, "solved", 0)
        assert (info["verifier_source"], info["verbatim"]["verdict"]) == ("reward.txt", "disagrees")
    with TerminalEnv(task=str(task), verbatim=False) as env:
        assert sum(rollout(env, [RIGHT], seed=0).rewards) == 3.0


@pytest.mark.parametrize("task", [HELLO, "families/tidy-files?level=1&seed=3"])
def test_same_seed_and_actions_give_the_same_episode(task: str) -> None:
    actions = ["ls -A", "cat missing", "date +%Z", Keys("C-c", 0.1), "false; echo $?", *oracle_actions(task)]
    episode = assert_deterministic(lambda: TerminalEnv(task=task), actions, seed=11)
    assert episode.solved


@pytest.mark.parametrize(
    ("mode", "rewards"),
    [("delta", [1.0, -1.0, 3.0]), ("level", [1.0, 0.0, 3.0]), ("final", [0.0, 0.0, 3.0]), ("solved", [0.0, 0.0, 1.0])],
)
def test_reward_modes(mode: str, rewards: list[float]) -> None:
    with TerminalEnv(task=HELLO, reward=mode) as env:
        assert rollout(env, ["touch hello.txt", "rm hello.txt", RIGHT], seed=0).rewards == rewards


def test_nothing_of_an_episode_reaches_the_next(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    env.step("touch hello.txt /tmp/left; export LEFT=1; cd /; sleep 1000 &")
    env.reset(seed=0)
    observation, _, _, _, info = env.step("ls -A /app /tmp; echo [$LEFT]; pwd; pgrep sleep || ps ax | grep -c '[s]leep'")
    assert "hello.txt" not in observation["output"]
    assert "left" not in observation["output"]
    assert "[]" in observation["output"]
    assert observation["cwd"] == "/app"
    assert info["verifiers_passed"] == 0


def test_only_changes_are_verified(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    assert "verify" not in env.step("ls; cat /etc/passwd > /dev/null")[4]["_timing"]
    assert "verify" in env.step("touch x")[4]["_timing"]
    assert "verify" not in env.step("pwd")[4]["_timing"]


def test_changed_system_files_are_named(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    assert env.step("touch /app/x /tmp/y; mkdir -p /usr/local/lib/new")[4]["tamper"] == ()
    info = env.step("cp /bin/true /usr/bin/wc; rm /usr/bin/yes; echo '#' >> /etc/passwd")[4]
    assert info["tamper"] == ("/etc/passwd", "/usr/bin/wc", "/usr/bin/yes")


def test_what_a_background_process_writes_is_seen_at_the_next_step(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    env.step("(sleep 0.4; echo hi > hello.txt) &")
    _, _, terminated, _, info = env.step("sleep 0.8")
    assert (terminated, info["verifiers_passed"]) == (True, 3)


def test_a_command_that_hangs_ends_at_its_limit(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    observation, _, _, truncated, info = env.step(Command("echo before; sleep 60", timeout_s=0.5))
    assert not truncated
    assert observation["output"].startswith("before")
    assert int(observation["exit_code"]) == 124
    assert info["infra_error"] is None
    assert env.step("echo after")[0]["output"].strip() == "after"


def test_long_output_stays_in_the_space(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    observation = env.step("head -c 300000 /dev/urandom; seq 200000")[0]
    assert observation in env.observation_space
    assert observation["output"].rstrip().endswith("200000")


def test_a_program_that_waits_is_answered_with_keys(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    assert env.step("read -r word; echo $word > hello.txt")[4]["state"] == "waiting_for_input"
    _, reward, terminated, _, _ = env.step(Keys("hi\n"))
    assert (reward, terminated) == (3.0, True)


def test_a_sandbox_killed_from_outside_is_an_infrastructure_failure(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    inner = env.unwrapped
    assert isinstance(inner, TerminalEnv)
    assert inner._machine is not None
    sandbox = inner._machine.sandbox
    process = sandbox.spawn(["sleep", "1000"])
    first_process = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(first_process, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while sandbox.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    observation, reward, terminated, truncated, info = env.step("echo still here")
    assert (reward, terminated, truncated, info["end_reason"]) == (0.0, False, True, "infra_failure")
    assert info["infra_error"]
    assert observation in env.observation_space
    assert info["state"] == "sandbox_dead"
    env.reset(seed=0)
    assert env.step(RIGHT)[1] == 3.0


def test_transcripts_of_real_episodes_are_the_same_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with RecordEpisode(TerminalEnv(task=HELLO, timing=False), tmp_path / name, screen=True) as env:
            rollout(env, ["ls", RIGHT], seed=1)
    first, second = ((tmp_path / name / "episode-000000.jsonl").read_text() for name in ("a", "b"))
    assert first == second


# ----------------------------------------------------------------------------------------------------------------------- vector
@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
def test_vector_environments_return_fresh_text(mode: str) -> None:
    envs = gym.make_vec("T1Terminal-v0", num_envs=3, vectorization_mode=mode, task=HELLO)
    try:
        observation, infos = envs.reset(seed=0)
        assert observation in envs.observation_space
        assert infos["verifiers_total"].tolist() == [3, 3, 3]
        for word in ("one", "two"):
            observation, rewards, *_ = envs.step(tuple(f"echo {word}-{index}" for index in range(3)))
            assert [text.strip() for text in observation["output"]] == [f"{word}-{index}" for index in range(3)]
        observation, rewards, terminated, truncated, infos = envs.step((RIGHT, "true", Submit()))
        assert rewards.tolist() == [3.0, 0.0, 0.0]
        assert terminated.tolist() == [True, False, True]
        assert not truncated.any()
        assert infos["end_reason"].tolist() == ["solved", None, "submitted"]
        assert infos["verbatim"]["verdict"].tolist() == ["agrees", "not_run", "agrees"]
        assert observation in envs.observation_space
        observation, rewards, terminated, _, _ = envs.step(("ignored", "pwd", "ignored"))
        assert observation["turn"].tolist() == [0, 4, 0]
        assert not terminated.any()
    finally:
        envs.close()


def test_the_vector_entry_point_is_the_default_and_honours_same_step() -> None:
    envs = gym.make_vec("T1Terminal-v0", num_envs=2, task=HELLO, autoreset_mode="SAME_STEP", max_episode_steps=5)
    try:
        assert isinstance(envs.unwrapped, TerminalVectorEnv)
        envs.reset(seed=[3, 4])
        observation, _, terminated, _, infos = envs.step(np.array([Submit(), "true"], dtype=object))
        assert terminated.tolist() == [True, False]
        assert observation["turn"].tolist() == [0, 1]
        assert infos["final_info"]["end_reason"][0] == "submitted"
        assert int(infos["final_obs"][0]["turn"]) == 1
    finally:
        envs.close()


# -------------------------------------------------------------------------------------------------------------------- clean-up
def test_nothing_is_left_behind() -> None:
    before = mounts()
    env = TerminalEnv(task=load_task(HELLO))
    env.reset(seed=0)
    assert env._machine is not None
    pid = env._machine.sandbox.spawn(["sleep", "1000"]).pid
    assert Path(f"/proc/{pid}").exists()
    del env
    gc.collect()
    assert not alive(pid)
    assert mounts() == before


def mounts() -> int:
    return len(Path("/proc/self/mounts").read_text().splitlines())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
