"""The thread vector environment on a small environment of text, against Gymnasium's own SyncVectorEnv."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from t1_env.errors import ConfigError
from t1_env.spaces import TerminalAction, TerminalText
from t1_env.vector import TerminalVectorEnv, ThreadVectorEnv


class Echo(gym.Env[dict[str, Any], Any]):
    """Says what it was told; ends after ``length`` steps; draws a number from its generator at each reset."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, length: int = 3, max_length: int = 50) -> None:
        self.observation_space = gym.spaces.Dict(
            {"text": TerminalText(max_length), "turn": gym.spaces.Box(0, 100, shape=(), dtype=np.int32), "state": gym.spaces.Discrete(3)}
        )
        self.action_space = TerminalAction()
        self.length = length
        self.closed = 0

    def _observation(self, text: str) -> dict[str, Any]:
        return {"text": text, "turn": np.array(self.turn, dtype=np.int32), "state": self.turn % 3}

    def _info(self) -> dict[str, Any]:
        return {"passed": self.turn, "name": f"env-{self.number}", "verifiers": {"a": self.turn > 1}, "reason": None, "tamper": ()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = 0
        self.number = int(self.np_random.integers(2**31))
        return self._observation(f"start {self.number} {options}"), self._info()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if action == "boom":
            raise RuntimeError("boom")
        self.turn += 1
        return self._observation(f"{self.number}: {action}"), float(self.turn), self.turn >= self.length, False, self._info()

    def close(self) -> None:
        self.closed += 1


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and all(same(a, b) for a, b in zip(one.flat, other.flat, strict=True))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_agrees_with_gymnasiums_sync_vector_env(mode: AutoresetMode) -> None:
    lengths = [2, 3, 4]
    ours = ThreadVectorEnv([lambda n=n: Echo(n) for n in lengths], autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda n=n: Echo(n) for n in lengths], autoreset_mode=mode)
    try:
        assert same(ours.reset(seed=5), theirs.reset(seed=5))
        for turn in range(9):
            actions = tuple(f"{turn}-{index}" for index in range(3))
            mine, other = ours.step(actions), theirs.step(actions)
            assert all(same(a, b) for a, b in zip(mine, other, strict=True)), (turn, mine, other)
            assert mine[0] in ours.observation_space
    finally:
        ours.close()
        theirs.close()


def test_disabled_autoreset_wants_a_mask() -> None:
    envs = ThreadVectorEnv([lambda n=n: Echo(n) for n in (1, 3)], autoreset_mode="DISABLED")
    with closing(envs):
        envs.reset(seed=0)
        _, _, terminated, _, _ = envs.step(("a", "b"))
        assert terminated.tolist() == [True, False]
        with pytest.raises(gym.error.ResetNeeded, match="environments 0 have ended"):
            envs.step(("a", "b"))
        observation, infos = envs.reset(options={"reset_mask": np.array([True, False])})
        assert observation["turn"].tolist() == [0, 1]
        assert infos["_passed"].tolist() == [True, False]
        envs.step(("a", "b"))


def test_text_is_fresh_and_what_was_kept_stays() -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        first, _ = envs.reset(seed=1)
        second = envs.step(("x", "y"))[0]
        third = envs.step(("p", "q"))[0]
        assert [text.split(": ")[1] for text in second["text"]] == ["x", "y"]
        assert [text.split(": ")[1] for text in third["text"]] == ["p", "q"]
        assert (first["turn"].tolist(), second["turn"].tolist(), third["turn"].tolist()) == ([0, 0], [1, 1], [2, 2])


def test_environments_step_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=20)

    class Meets(Echo):
        def step(self, action: Any) -> Any:
            barrier.wait()
            return super().step(action)

    with closing(ThreadVectorEnv([Meets] * 3)) as envs:
        envs.reset(seed=0)
        envs.step(("a", "b", "c"))


@pytest.mark.parametrize("seed", [[4, 4], [4, None], None, np.int64(3)])
def test_seeds(seed: Any) -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        observation, _ = envs.reset(seed=seed)
        same_start = observation["text"][0] == observation["text"][1]
        assert same_start == (isinstance(seed, list) and seed == [4, 4])


def test_an_error_in_one_environment_names_it_and_waits_for_the_others() -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        envs.reset(seed=0)
        with pytest.raises(RuntimeError, match="boom") as caught:
            envs.step(("fine", "boom"))
        assert caught.value.__notes__ == ["in environment 1 of the vector environment"]
        assert envs.get_attr("turn") == (1, 0)


@pytest.mark.parametrize("actions", ["ls", ("ls",), ("a", "b", "c"), []])
def test_wrong_number_of_actions(actions: Any) -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        envs.reset(seed=0)
        with pytest.raises(ConfigError):
            envs.step(actions)


@pytest.mark.parametrize("mask", [np.array([True]), np.array([1, 0]), [True, False], np.zeros(2, dtype=np.bool_)])
def test_bad_reset_masks(mask: Any) -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        envs.reset()
        with pytest.raises(ConfigError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})


def test_a_partial_first_reset_and_wrong_seeds_are_refused() -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        with pytest.raises(ConfigError, match="seed has 3 entries"):
            envs.reset(seed=[1, 2, 3])
        with pytest.raises(gym.error.ResetNeeded):
            envs.reset(options={"reset_mask": np.array([True, False])})


def test_closing_closes_every_environment_once() -> None:
    envs = ThreadVectorEnv([Echo, Echo])
    inner = envs.envs
    envs.close()
    envs.close()
    assert [env.closed for env in inner] == [1, 1]


def test_environments_made_before_a_failure_are_closed() -> None:
    made: list[Echo] = []

    def make() -> Echo:
        if len(made) == 2:
            raise ConfigError("no third")
        made.append(Echo())
        return made[-1]

    with pytest.raises(ConfigError, match="no third"):
        ThreadVectorEnv([make] * 3)
    assert [env.closed for env in made] == [1, 1]


def test_different_spaces_are_refused() -> None:
    with pytest.raises(ConfigError, match="environment 1 has other spaces"):
        ThreadVectorEnv([Echo, lambda: Echo(max_length=7)])


@pytest.mark.parametrize("arguments", [{"num_envs": 0}, {"num_envs": True}, {"num_envs": 1, "autoreset_mode": "later"}])
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TerminalVectorEnv(**arguments)


def test_attributes_are_set_for_each() -> None:
    with closing(ThreadVectorEnv([Echo, Echo])) as envs:
        envs.set_attr("length", [7, 8])
        assert envs.get_attr("length") == (7, 8)
        envs.set_attr("length", 5)
        assert envs.get_attr("length") == (5, 5)
        with pytest.raises(ConfigError, match="3 values"):
            envs.set_attr("length", [1, 2, 3])
