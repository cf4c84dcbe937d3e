"""Wrappers on a scripted terminal: what they hand out, what they refuse, what a transcript holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.config import EnvConfig
from t1_env.errors import ConfigError
from t1_env.protocol import SCHEMA_VERSION, SHELL_STATES, Command, Keys, ShellState, Submit
from t1_env.spaces import MAX_CODE_POINT, TerminalAction, observation_space
from t1_env.timing import Timing
from t1_env.wrappers import SCREEN_CLASSES, ArrayObservation, HistoryWindow, MenuAction, RecordEpisode, TextObservation, screen_classes

ROWS, COLS, OUTPUT = 2, 20, 256


class Scripted(gym.Env[dict[str, Any], Any]):
    """Looks like a TerminalEnv; ends when told ``Submit``."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        self.observation_space = observation_space(ROWS, COLS, OUTPUT)
        self.action_space = TerminalAction()
        self.config = EnvConfig(max_turns=4)
        self.actions: list[Any] = []

    def _observation(self, output: str, exit_code: int = -1) -> dict[str, Any]:
        screen = np.zeros((ROWS, COLS), dtype=np.uint32)
        screen[0, : min(COLS, len(output))] = [ord(char) for char in output[:COLS]]
        return {
            "cwd": "/app",
            "exit_code": np.array(exit_code, dtype=np.int32),
            "output": output,
            "screen": screen,
            "state": SHELL_STATES.index(ShellState.IDLE),
            "turn": np.array(len(self.actions), dtype=np.int32),
        }

    def _info(self, end_reason: str | None = None) -> dict[str, Any]:
        return {"task_id": "seeds/x", "verifiers": {"a": True}, "tamper": (), "end_reason": end_reason, "_timing": Timing({"step": 0.5})}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.actions = []
        return self._observation("Write é."), self._info()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        ended = isinstance(action, Submit)
        return self._observation(f"out {len(self.actions)}", 0), 1.0, ended, False, self._info("submitted" if ended else None)


# ------------------------------------------------------------------------------------------------------------------------- text
def test_text_observation_has_a_status_line() -> None:
    env = TextObservation(Scripted())
    first, _ = env.reset(seed=0)
    assert first == "[turn 0 | idle | /app]\nWrite é."
    second = env.step("ls")[0]
    assert second == "[turn 1 | exit 0 | idle | /app]\nout 1"
    assert first in env.observation_space
    assert second in env.observation_space


def test_text_observation_without_status() -> None:
    env = TextObservation(Scripted(), status=False)
    assert env.reset()[0] == "Write é."


def test_history_keeps_the_instruction_and_the_last_turns() -> None:
    env = HistoryWindow(TextObservation(Scripted(), status=False), turns=2)
    env.reset(seed=0)
    env.step("one")
    env.step(Command("two"))
    observation = env.step(Keys("C-c"))[0]
    assert observation == "Write é.\n$ two\nout 2\nkeys: C-c\nout 3"
    assert env.step("x" * 10_000)[0] in env.observation_space
    assert env.reset()[0] == "Write é."


def test_history_does_not_outlive_a_reset() -> None:
    env = HistoryWindow(TextObservation(Scripted(), status=False))
    env.reset()
    env.step("one")
    env.reset()
    assert "one" not in env.step("two")[0]


@pytest.mark.parametrize("turns", [0, -1, 1.5, True, "3"])
def test_history_refuses_bad_windows(turns: Any) -> None:
    with pytest.raises(ConfigError, match="turns="):
        HistoryWindow(TextObservation(Scripted()), turns=turns)


@pytest.mark.parametrize("wrapper", [HistoryWindow, lambda env: TextObservation(ArrayObservation(env))])
def test_wrappers_refuse_observations_they_cannot_read(wrapper: Any) -> None:
    with pytest.raises(ConfigError, match="needs"):
        wrapper(Scripted())


# ----------------------------------------------------------------------------------------------------------------------- arrays
@given(st.lists(st.integers(0, MAX_CODE_POINT), min_size=1, max_size=40))
def test_screen_classes_are_in_range_and_ascii_keeps_its_order(codes: list[int]) -> None:
    classes = screen_classes(np.array([codes], dtype=np.uint32))
    assert classes.dtype == np.uint8
    for code, found in zip(codes, classes.tolist(), strict=True):
        assert 0 <= found < SCREEN_CLASSES
        if 33 <= code < 127:
            assert found == code - 32
        else:
            assert found == (0 if code in (0, 32) else SCREEN_CLASSES - 1)


def test_a_scaled_screen_is_the_same_between_0_and_1() -> None:
    plain, scaled = ArrayObservation(Scripted()), ArrayObservation(Scripted(), scaled=True)
    one, other = plain.reset(seed=0)[0]["screen"], scaled.reset(seed=0)[0]["screen"]
    assert (other.dtype, float(other.max()) <= 1.0) == (np.float32, True)
    np.testing.assert_allclose(other * (SCREEN_CLASSES - 1), one, rtol=1e-6)
    assert scaled.reset()[0] in scaled.observation_space


def test_array_observation_is_flat_and_in_its_space() -> None:
    env = ArrayObservation(Scripted())
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert observation["screen"].shape == (ROWS * COLS,)
    assert observation["screen"][0] == ord("W") - 32
    assert observation["status"][3] == 1.0
    for _ in range(6):
        observation = env.step("ls")[0]
        assert observation in env.observation_space
    assert observation["status"][[0, 1, 2, 3]].tolist() == [1.0, 1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------------------------------- menu
def test_menu_turns_numbers_into_actions() -> None:
    inner = Scripted()
    env = MenuAction(inner, ["ls", Command("make", 5.0), Keys("C-c")])
    env.reset()
    assert env.action_space.n == 4
    assert env.labels() == ["ls", "make", "keys: C-c", "submit"]
    for number in (0, np.int64(1), 2, 3):
        terminated = env.step(number)[2]
    assert terminated
    assert inner.actions == ["ls", Command("make", 5.0), Keys("C-c"), Submit()]
    assert MenuAction(inner, ["ls"], submit=False).action_space.n == 1


@pytest.mark.parametrize("number", [-1, 4, 1.0, "ls", None])
def test_menu_refuses_other_numbers(number: Any) -> None:
    env = MenuAction(Scripted(), ["a", "b", "c"])
    env.reset()
    with pytest.raises(gym.error.InvalidAction, match="from 0 to 3"):
        env.step(number)


@pytest.mark.parametrize("menu", [[], "ls", [3], [b"ls"]])
def test_bad_menus(menu: Any) -> None:
    with pytest.raises(ConfigError, match="menu"):
        MenuAction(Scripted(), menu)


# --------------------------------------------------------------------------------------------------------------------- recording
def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_a_transcript_holds_every_step(tmp_path: Path) -> None:
    env = RecordEpisode(Scripted(), tmp_path / "new" / "runs", screen=True)
    env.reset(seed=3, options={"task": "seeds/x"})
    env.step("ls")
    assert [path.suffix for path in env.directory.iterdir()] == [".partial"]
    env.step(Submit())
    assert env.last_path == tmp_path / "new" / "runs" / "episode-000000.jsonl"
    reset, step, submit, end = read(env.last_path)
    assert {line["schema_version"] for line in (reset, step, submit, end)} == {SCHEMA_VERSION}
    assert (reset["kind"], reset["seed"], reset["options"]) == ("reset", 3, {"task": "seeds/x"})
    assert reset["observation"]["output"] == "Write é."
    assert step["action"] == "ls"
    assert step["observation"]["screen"] == ["out 1", ""]
    assert step["info"]["_timing"] == {"step": 0.5}
    assert (step["reward"], step["terminated"], submit["terminated"]) == (1.0, False, True)
    assert submit["action"] == {"kind": "submit"}
    assert (end["kind"], end["end_reason"]) == ("end", "submitted")


def test_every_episode_has_a_file_and_none_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "episode-000001.jsonl").write_text("old")
    (tmp_path / "episode-000002.jsonl.partial").write_text("left by a killed run")
    env = RecordEpisode(Scripted(), tmp_path)
    for _ in range(2):
        env.reset()
        env.step("ls")
    env.reset()
    env.close()
    env.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "episode-000000.jsonl",
        "episode-000001.jsonl",
        "episode-000002.jsonl.partial",
        "episode-000003.jsonl",
        "episode-000004.jsonl",
    ]
    assert (tmp_path / "episode-000001.jsonl").read_text() == "old"
    assert read(tmp_path / "episode-000000.jsonl")[-1]["end_reason"] == "reset"
    assert read(tmp_path / "episode-000004.jsonl")[-1]["end_reason"] == "closed"


def test_two_recorders_share_a_directory(tmp_path: Path) -> None:
    first, second = RecordEpisode(Scripted(), tmp_path), RecordEpisode(Scripted(), tmp_path)
    first.reset()
    second.reset()
    first.step("from first")
    second.step("from second")
    first.close()
    second.close()
    said = [read(path)[1]["action"] for path in sorted(tmp_path.iterdir())]
    assert said == ["from first", "from second"]


def test_control_characters_and_lone_surrogates_are_written(tmp_path: Path) -> None:
    env = RecordEpisode(Scripted(), tmp_path)
    env.reset()
    env.step("printf '\x1b[0m\u2028\n\ud800'")
    env.close()
    assert read(tmp_path / "episode-000000.jsonl")[1]["action"] == "printf '\x1b[0m\u2028\n\ud800'"


def test_an_unusable_directory_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        RecordEpisode(Scripted(), tmp_path / "file" / "runs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        RecordEpisode(Scripted(), tmp_path)
