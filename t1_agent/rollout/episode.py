"""One episode: the environment, the ledger and the rules that join them.

The policy's token ids go into the ledger exactly as they were sampled. What the environment is told is a read-only view of them
(``t1_agent.tito.parse``); what it answers is appended as environment tokens. Nothing here re-tokenises anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from t1_agent.tito.codec import TurnCodec
from t1_agent.tito.drift import drift_tokens_in_loss
from t1_agent.tito.ledger import Ledger
from t1_agent.tito.observation import render_observation
from t1_agent.tito.parse import SUBMIT_WORD, parse_action
from t1_agent.types import Completion, IntArray, Trajectory, Turn
from t1_env.errors import SandboxError, SandboxUnavailable, ShellError, VerifierError
from t1_env.protocol import EndReason, Submit


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What the trainer allows an episode, beside the environment's own budgets.

    Args:
        max_turns: Most turns.
        max_context_tokens: Most tokens of prompt and episode together; the episode is cut before a turn that could pass it.
        max_turn_tokens: Most tokens of one turn (the sampler's ``max_tokens``).
        observation_chars: Most characters of command output shown to the policy a turn (head and tail kept).
    """

    max_turns: int = 16
    max_context_tokens: int = 1024
    max_turn_tokens: int = 64
    observation_chars: int = 240


class Episode:
    """Plays one task with completions given from outside.

    ``begin`` and ``advance`` talk to the sandbox and may run on any thread, one call at a time.

    Args:
        env: An environment with T1Terminal's spaces; reused from episode to episode.
        codec: Borders of a turn.
        limits: See ``EpisodeLimits``.
        session_id: Name of the episode for the engine's prefix cache.
    """

    def __init__(self, env: Any, codec: TurnCodec, limits: EpisodeLimits, *, session_id: str) -> None:
        self.session_id = session_id
        self.completions: list[Completion] = []
        self._env = env
        self._codec = codec
        self._limits = limits
        self._ledger: Ledger | None = None
        self._task_id = ""
        self._seed = 0
        self._instruction = ""
        self._turns: list[Turn] = []
        self._rewards: list[float] = []
        self._info: dict[str, Any] = {}
        self._terminated = False
        self._truncated = False
        self._end_reason = ""
        self._sandbox_s = 0.0

    @property
    def done(self) -> bool:
        """Whether the episode ended."""
        return self._terminated or self._truncated

    @property
    def prompt_ids(self) -> IntArray:
        """Everything so far: what the engine reads next. Starts with the previous turn's prompt and completion, id for id."""
        return self._require_ledger().prompt_ids()

    def begin(self, task_id: str, seed: int) -> None:
        """Reset the environment onto a task and write the prompt.

        A sandbox that cannot be made ends the episode as an infra failure; a machine that can make none raises.

        Raises:
            SandboxUnavailable: This machine cannot run sandboxes.
            TaskError: The task is unknown or malformed.
        """
        self._task_id, self._seed = task_id, seed
        self._ledger = Ledger(self._codec)
        start = time.perf_counter()
        try:
            _, self._info = self._env.reset(seed=seed % 2**31, options={"task": task_id})
        except SandboxUnavailable:
            raise
        except (SandboxError, ShellError, VerifierError) as error:
            # The environment has tried again by itself. One bad episode must not end a run of thousands.
            self._info = {"instruction": task_id, "verifiers_passed": 0, "verifiers_total": 0, "infra_error": str(error)}
            self._truncated, self._end_reason = True, EndReason.INFRA_FAILURE.value
        self._sandbox_s += time.perf_counter() - start
        self._instruction = self._info["instruction"]
        self._ledger.append_prompt(self._instruction)
        if not self.done:
            self._cut_if_over_budget()

    def advance(self, completion: Completion) -> None:
        """Take one sampled turn: append it, act on it, append what came back.

        Where the environment verifies beside the sampler (``verify_async=True``), the reward of the turn before is credited first. If the
        episode turns out to have ended with that turn, the sampled one is dropped: it follows no state of the episode.
        """
        self._credit_late_reward()
        if self.done:
            return
        ledger = self._require_ledger()
        ledger.append_completion(completion)
        self.completions.append(completion)
        parsed = parse_action(completion, self._codec)
        if parsed.action is None:
            # Nothing is executed: a cut or empty turn is answered by a word of the environment and costs a turn.
            reward, exit_code, observation, seconds = 0.0, -1, parsed.problem, 0.0
        else:
            start = time.perf_counter()
            obs, reward, self._terminated, self._truncated, self._info = self._env.step(parsed.action)
            seconds = time.perf_counter() - start
            exit_code = int(obs["exit_code"])
            observation = render_observation(obs, max_chars=self._limits.observation_chars)
        self._sandbox_s += seconds
        self._rewards.append(float(reward))
        self._end_reason = self._info.get("end_reason") or ""
        passed = int(self._info["verifiers_passed"])
        shown = "" if self.done else observation
        action = SUBMIT_WORD if isinstance(parsed.action, Submit) else parsed.action
        self._turns.append(Turn(parsed.text, action, shown, float(reward), passed, exit_code, seconds))
        if not self.done:
            ledger.append_observation(observation)
            self._cut_if_over_budget()

    def trajectory(self) -> Trajectory:
        """The finished episode as a record for the learner.

        Raises:
            ValueError: If the episode has not ended.
        """
        if not self.done:
            raise ValueError(f"episode of {self._task_id} has not ended after {len(self._turns)} turns")
        trajectory = self._require_ledger().to_trajectory(
            task_id=self._task_id,
            rewards=np.asarray(self._rewards, dtype=np.float32),
            terminated=self._terminated,
            truncated=self._truncated,
            end_reason=self._end_reason,
            verifiers_passed=int(self._info["verifiers_passed"]),
            verifiers_total=int(self._info["verifiers_total"]),
            turns=tuple(self._turns),
            metadata={
                "seed": self._seed,
                "instruction": self._instruction,
                "sandbox_s": round(self._sandbox_s, 4),
                "infra_error": self._info.get("infra_error"),
            },
        )
        # Counted against the engine's own completions, kept apart from the ledger: checked, not assumed.
        drift = drift_tokens_in_loss(trajectory, self.completions)
        return replace(trajectory, metadata={**trajectory.metadata, "drift_tokens_in_loss": drift})

    def _credit_late_reward(self) -> None:
        """Wait for the verifiers that the last turn left running, and give that turn what it earned."""
        if not self._info.get("reward_pending"):
            return
        start = time.perf_counter()
        self._info = self._env.get_wrapper_attr("collect_late_reward")()
        waited_s = time.perf_counter() - start
        self._sandbox_s += waited_s
        earned, end_reason = float(self._info["late_reward"]["reward"]), self._info["end_reason"]
        if end_reason is not None:
            self._terminated, self._truncated = EndReason(end_reason).terminates, not EndReason(end_reason).terminates
            self._end_reason = end_reason
        # Asked before every turn, whether or not that one reaches the environment: the turn that earned this is the last one.
        last, passed = self._turns[-1], int(self._info["verifiers_passed"])
        shown = "" if self.done else last.observation
        self._rewards[-1] = earned
        self._turns[-1] = replace(last, observation=shown, reward=earned, verifiers_passed=passed, seconds=last.seconds + waited_s)

    def _cut_if_over_budget(self) -> None:
        if len(self._turns) >= self._limits.max_turns:
            reason = EndReason.TURN_LIMIT
        elif len(self.prompt_ids) + self._limits.max_turn_tokens > self._limits.max_context_tokens:
            reason = EndReason.CONTEXT_LIMIT
        else:
            return
        self._credit_late_reward()
        if not self.done:
            self._truncated, self._end_reason = True, reason.value

    def _require_ledger(self) -> Ledger:
        if self._ledger is None:
            raise ValueError("the episode has not begun: call begin(task_id, seed) first")
        return self._ledger
