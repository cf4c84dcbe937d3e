"""Transcripts: what was done, seen and paid, one JSON object a line."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np

from t1_env.errors import ConfigError
from t1_env.protocol import SCHEMA_VERSION
from t1_env.spaces import action_to_json


def to_json(value: Any) -> Any:
    """Return an observation or info as JSON data (arrays become nested lists, tuples become lists)."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return repr(value)


def screen_lines(screen: np.ndarray[Any, Any]) -> list[str]:
    """Return a screen as one string a row, trailing blanks removed.

    Args:
        screen: uint32 [rows, cols], code points; 0 is blank.
    """
    return ["".join(chr(code) if code else " " for code in row).rstrip() for row in screen.tolist()]


class RecordEpisode(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Writes each episode to ``<directory>/episode-000000.jsonl``: one line for the reset, one for each step, one for the end.

    Everything is written as it happened; nothing is masked. An episode is written to a ``.partial`` file that takes its final name
    when the episode ends, is reset or is closed, so a file with the final name is always whole, and an existing file is never touched.

    Args:
        env: Any environment whose innermost one is a ``TerminalEnv``. Put this wrapper below those that change actions or observations.
        directory: Where to write; created if missing.
        screen: Whether to write the screen as well (as lines of text).

    Raises:
        ConfigError: If the directory cannot be written.
    """

    def __init__(self, env: gym.Env[Any, Any], directory: str | os.PathLike[str], *, screen: bool = False) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, directory=directory, screen=screen)
        super().__init__(env)
        self.directory = Path(directory)
        self.last_path: Path | None = None
        self._screen = screen
        self._file: IO[str] | None = None
        self._path = self.directory
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"transcript directory {self.directory} cannot be made: {error.strerror}; choose another") from error
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise ConfigError(f"transcript directory {self.directory} is not writable; choose another or change its permissions")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset and begin a new transcript."""
        self._finish("reset")
        observation, info = self.env.reset(seed=seed, options=options)
        self._begin()
        line = {"seed": seed, "options": to_json({key: str(value) for key, value in (options or {}).items()})}
        self._write("reset", **line, observation=self._observation(observation), info=to_json(info))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and write the step's line; the last step of an episode completes the file."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._write(
            "step",
            action=action_to_json(action),
            observation=self._observation(observation),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=to_json(info),
        )
        if terminated or truncated:
            self._finish(str(info.get("end_reason")))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Complete the transcript and close the environment."""
        self._finish("closed")
        super().close()

    def _observation(self, observation: Any) -> Any:
        if not isinstance(observation, dict):
            return to_json(observation)
        record = {key: to_json(value) for key, value in observation.items() if key != "screen"}
        if self._screen and "screen" in observation:
            record["screen"] = screen_lines(observation["screen"])
        return record

    def _begin(self) -> None:
        # The partial file is taken first and the final name looked at second, so two recorders can never end up with the same number.
        for index in itertools.count():
            self._path = self.directory / f"episode-{index:06d}.jsonl"
            partial = self._partial
            try:
                # A lone surrogate in an action becomes its JSON escape instead of an encoding error.
                self._file = partial.open("x", encoding="utf-8", errors="backslashreplace")
            except FileExistsError:
                continue
            if not self._path.exists():
                return
            self._file.close()
            partial.unlink()

    @property
    def _partial(self) -> Path:
        return self._path.with_name(f"{self._path.name}.partial")

    def _write(self, kind: str, **record: Any) -> None:
        if self._file is None:
            return
        line = {"schema_version": SCHEMA_VERSION, "kind": kind, **record}
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def _finish(self, reason: str) -> None:
        if self._file is None:
            return
        self._write("end", end_reason=reason)
        self._file.close()
        self._file = None
        self._partial.replace(self._path)
        self.last_path = self._path
