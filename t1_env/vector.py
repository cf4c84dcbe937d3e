"""Many environments in one process, one thread each.

A step of ``T1Terminal-v0`` mostly waits for processes in its sandbox, so threads are enough and nothing is pickled. Gymnasium's own
``AsyncVectorEnv`` keeps text in shared memory that it decodes only once, and returns stale text from then on; this one hands over the
very observations that the environments returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from t1_env.errors import ConfigError
from t1_env.protocol import Command, Keys, Submit

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
_StepResult = tuple[Any, float, bool, bool, dict[str, Any], "tuple[Any, dict[str, Any]] | None"]


class ThreadVectorEnv(VectorEnv[Any, Any, Any]):
    """Runs several environments at the same time, each in a thread of its own.

    Args:
        env_fns: One function for each environment; all must have the same spaces.
        autoreset_mode: ``AutoresetMode`` or its name: ``NEXT_STEP`` (the step after an episode's end resets and ignores its action),
            ``SAME_STEP`` (the ending step resets; the last observation is in ``info["final_obs"]``) or ``DISABLED`` (the caller resets
            with ``options={"reset_mask": ...}``).
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gym.Env[Any, Any]]], *, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP
    ) -> None:
        if not env_fns:
            raise ConfigError("a vector environment needs at least one environment, got none")
        self.autoreset_mode = _autoreset_mode(autoreset_mode)
        self.envs: list[gym.Env[Any, Any]] = []
        try:
            for env_fn in env_fns:
                self.envs.append(env_fn())
        except BaseException:
            for env in self.envs:
                env.close()
            raise
        first = self.envs[0]
        self.num_envs = len(self.envs)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        for index, env in enumerate(self.envs):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                self._close_envs()
                raise ConfigError(f"environment {index} has other spaces than environment 0; all must have the same")
        self._pool = ThreadPoolExecutor(self.num_envs, thread_name_prefix="t1-vector-env")
        self._observations: list[Any] = [None] * self.num_envs
        self._ended: BoolArray = np.zeros(self.num_envs, dtype=np.bool_)

    # ------------------------------------------------------------------------------------------------------- reset and step
    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in ``options["reset_mask"]``, at the same time.

        Args:
            seed: None; an int (environment i gets ``seed + i``); or one seed for each environment.
            options: Passed to every environment, without ``reset_mask``.

        Returns:
            Batched observations and info.
        """
        seeds = self._seeds(seed)
        options = dict(options) if options else {}
        mask = self._reset_mask(options.pop("reset_mask", None))
        indices = [int(index) for index in np.flatnonzero(mask)]
        results = self._run([(index, self.envs[index].reset, {"seed": seeds[index], "options": options or None}) for index in indices])
        infos: dict[str, Any] = {}
        for index, (observation, info) in zip(indices, results, strict=True):
            self._observations[index] = observation
            self._ended[index] = False
            infos = self._add_info(infos, info, index)
        return self._batch(), infos

    def step(self, actions: Iterable[Any]) -> tuple[Any, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Step all environments at the same time.

        Args:
            actions: One action for each environment (a tuple, list or object array).

        Returns:
            Batched observations, rewards float64 [n], terminations bool [n], truncations bool [n] and info.
        """
        chosen = self._actions(actions)
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            ended = ", ".join(map(str, np.flatnonzero(self._ended)))
            raise gym.error.ResetNeeded(f"environments {ended} have ended; reset them with options={{'reset_mask': ...}} before stepping")
        results: list[_StepResult] = self._run(
            [(index, self._step_one, {"index": index, "action": chosen[index]}) for index in range(self.num_envs)]
        )
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations, truncations = np.zeros(self.num_envs, dtype=np.bool_), np.zeros(self.num_envs, dtype=np.bool_)
        infos: dict[str, Any] = {}
        for index, (observation, reward, terminated, truncated, info, restarted) in enumerate(results):
            rewards[index], terminations[index], truncations[index] = reward, terminated, truncated
            self._observations[index] = observation
            if restarted is not None:
                infos = self._add_info(infos, {"final_obs": observation, "final_info": info}, index)
                self._observations[index], info = restarted
            infos = self._add_info(infos, info, index)
        self._ended = terminations | truncations
        return self._batch(), rewards, terminations, truncations, infos

    def _step_one(self, index: int, action: Any) -> _StepResult:
        env = self.envs[index]
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and self._ended[index]:
            observation, info = env.reset()
            return observation, 0.0, False, False, info, None
        observation, reward, terminated, truncated, info = env.step(action)
        restarted = env.reset() if self.autoreset_mode is AutoresetMode.SAME_STEP and (terminated or truncated) else None
        return observation, float(reward), terminated, truncated, info, restarted

    def _run(self, calls: list[tuple[int, Callable[..., Any], dict[str, Any]]]) -> list[Any]:
        # Every call is waited for before the first error is raised: no environment is left stepping behind the caller's back.
        futures: list[Future[Any]] = [self._pool.submit(call, **arguments) for _, call, arguments in calls]
        errors = [future.exception() for future in futures]
        for (index, _, _), error in zip(calls, errors, strict=True):
            if error is not None:
                error.add_note(f"in environment {index} of the vector environment")
                raise error
        return [future.result() for future in futures]

    def _batch(self) -> Any:
        if any(observation is None for observation in self._observations):
            raise gym.error.ResetNeeded("not every environment was reset yet; call reset() without a reset_mask first")
        # Fresh arrays each time: what a caller kept from an earlier step never changes under it.
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, self._observations, out)

    # ----------------------------------------------------------------------------------------------------- checked arguments
    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigError(f"seed has {len(seed)} entries, expected one for each of the {self.num_envs} environments")
        return list(seed)

    def _reset_mask(self, mask: Any) -> BoolArray:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self.num_envs,) and mask.any()):
            raise ConfigError(f"options['reset_mask']={mask!r}: expected a bool array of shape ({self.num_envs},) with at least one True")
        return mask

    def _actions(self, actions: Iterable[Any]) -> list[Any]:
        if isinstance(actions, str | Command | Keys | Submit):
            raise ConfigError(f"actions={actions!r}: expected a sequence of {self.num_envs} actions, got a single one")
        chosen = list(actions)
        if len(chosen) != self.num_envs:
            raise ConfigError(f"got {len(chosen)} actions, expected one for each of the {self.num_envs} environments")
        return chosen

    # ------------------------------------------------------------------------------------------------------------ the rest
    @property
    def np_random_seed(self) -> Any:
        """Seed of each environment's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # read-only and one per environment, as in Gymnasium's SyncVectorEnv
    def np_random(self) -> Any:
        """Generator of each environment."""
        return self.get_attr("np_random")

    def render(self) -> tuple[Any, ...]:
        """Return the rendering of each environment."""
        return tuple(env.render() for env in self.envs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute of it.

        Args:
            name: Name of the method or attribute, also of a wrapper.
            *args: Arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            One result for each environment.
        """
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return tuple(value(*args, **kwargs) if callable(value) else value for value in found)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment.

        Args:
            name: Name of the attribute.
            values: One value for all, or a list or tuple with one for each environment.
        """
        chosen = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(chosen) != self.num_envs:
            raise ConfigError(f"got {len(chosen)} values, expected one for each of the {self.num_envs} environments")
        for env, value in zip(self.envs, chosen, strict=True):
            env.set_wrapper_attr(name, value)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment and end the threads."""
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=True)
        self._close_envs()

    def _close_envs(self) -> None:
        for env in getattr(self, "envs", []):
            env.close()


class TerminalVectorEnv(ThreadVectorEnv):
    """Vector entry point of ``T1Terminal-v0``: ``gym.make_vec("T1Terminal-v0", num_envs=4, task=...)``.

    Args:
        num_envs: Number of environments.
        autoreset_mode: See ``ThreadVectorEnv``.
        max_episode_steps: Same as ``max_turns`` when it is the smaller of the two.
        wrappers: Applied to each environment, innermost first.
        **kwargs: Arguments of ``TerminalEnv``.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
        **kwargs: Any,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ConfigError(f"num_envs={num_envs!r}: expected an integer of at least 1")
        if max_episode_steps is not None:
            kwargs["max_turns"] = min(max_episode_steps, kwargs.get("max_turns", max_episode_steps))

        def make_one() -> gym.Env[Any, Any]:
            from t1_env.env import TerminalEnv

            env: gym.Env[Any, Any] = TerminalEnv(**kwargs)
            for wrapper in wrappers:
                env = wrapper(env)
            return env

        super().__init__([make_one] * num_envs, autoreset_mode=autoreset_mode)


def _autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    if isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if mode in (known.name, known.value, known.name.lower()):
            return known
    raise ConfigError(f"autoreset_mode={mode!r}: expected one of {', '.join(known.name for known in AutoresetMode)}")
