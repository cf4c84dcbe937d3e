"""``T1Terminal-v0``: the order of things in an episode. The details live in ``machine``, ``reward`` and ``episode``."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import gymnasium as gym
import numpy as np

from t1_env.config import EnvConfig, reject_unknown
from t1_env.episode import Budget, Episode
from t1_env.errors import ImageBuildError, SandboxDied, SandboxError, SandboxUnavailable, ShellError, T1Error, VerifierError
from t1_env.machine import Machine, sandbox_factory
from t1_env.protocol import (
    SCHEMA_VERSION,
    SHELL_STATES,
    Action,
    Command,
    EndReason,
    Keys,
    ShellState,
    Submit,
    VerbatimVerdict,
    VerifierReport,
)
from t1_env.reward import RewardInput, make_reward, total
from t1_env.shell import ShellConfig, ShellResult
from t1_env.spaces import MAX_ACTION_CHARS, MAX_CWD_CHARS, NO_EXIT_CODE, TerminalAction, clip_text, observation_space, to_unicode
from t1_env.tasks import Task, TaskSpec, resolve_tasks
from t1_env.timing import Stopwatch
from t1_env.verification import NOTHING_LATE, PENDING_TERM, LateReward, PendingVerification, Schedule
from t1_env.wrappers.record import screen_lines

Observation = dict[str, Any]
_STEP_MARGIN_S = 1.0
_MAX_NOTE_CHARS = 2000


class TerminalEnv(gym.Env[Observation, Action]):
    """
    ## Description

    An agent drives a real shell in a sandbox to do a task, such as "move every log older than a week into `archive/`". The task's own
    verifiers, which are pytest tests the agent never sees, run in a throw-away clone of the sandbox after every step that changed the
    filesystem, and the agent is paid for each one that passes. An episode may take hundreds of steps.

    ```python
    import gymnasium as gym
    import t1_env

    env = gym.make("T1Terminal-v0", task="seeds/hello-file")
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("ls -l")
    env.close()
    ```

    ## Action Space

    A `TerminalAction`, one of:

    | Action | Meaning |
    |---|---|
    | `str` | A command line, run until it ends or reaches `step_timeout_s` |
    | `Command(text, timeout_s)` | The same with a time limit of its own |
    | `Keys(text, wait_s)` | Keystrokes for the program in the foreground: literal text or one key such as `"C-c"` |
    | `Submit()` | The task is done: the episode terminates |

    `action_space.sample()` draws harmless read-only commands.

    ## Observation Space

    A `Dict`; every part is bounded:

    | Key | Space | Meaning |
    |---|---|---|
    | `output` | `TerminalText` | What this step printed (head and tail, saying how much is left out); after `reset` the instruction |
    | `screen` | `Box(uint32, (rows, cols))` | Code points on the terminal's screen, 0 where nothing was written |
    | `exit_code` | `Box(int32, ())`, -1 to 255 | Exit status of the command, -1 if none ended |
    | `state` | `Discrete(7)` | Index into `SHELL_STATES`, the names of what the terminal is doing |
    | `cwd` | `TerminalText` | Working directory of the shell |
    | `turn` | `Box(int32, ())` | Steps taken so far |

    How many verifiers pass is never part of the observation: it would be an oracle to probe.

    ## Rewards

    With `c` the number of verifiers that pass and `c0` that number in the untouched environment:

    - `reward="delta"` (default): the change of `c` in this step, so an episode's return is `c - c0` at its end;
    - `reward="level"`: `c - c0` after every step;
    - `reward="final"`: `c - c0` at the end of the episode, else 0;
    - `reward="solved"`: 1 at the end if every verifier passes, else 0;
    - a callable taking a `t1_env.reward.RewardInput` and returning a number or named numbers.

    `gamma=` gives the potential-based form. `info["reward_terms"]` holds the parts that sum to the reward.

    ## Late Rewards

    With `verify_async=True` the verifiers of a step run while the caller decides on the next one. The step returns what is known by then:
    a reward of 0 and `info["reward_pending"] = True`. The next step first waits for the report, and its reward holds what the step before
    it earned, besides its own; `info["late_reward"]` says how much, so that
    `t1_env.wrappers.fold_late_rewards` can give every step its own. The sum over an episode is that of `verify_async=False`, and so is
    every folded reward. The last step of an episode always waits. If the report ends the episode (all verifiers pass, or the machinery
    failed), the action of the step that learns of it is not carried out: `info["action_executed"]` is `False` and `turn` stands still.
    Whoever ends an episode early calls `collect_late_reward()` for what the last step earned.

    ## Starting State

    A new sandbox with the task's environment built in it, a new shell in the task's working directory, and the count of
    verifiers that pass untouched (taken anew until it is known what they say; see `t1_env.verifiers.baseline`).
    Nothing of an earlier episode is reused. With several tasks, `reset(seed=...)` picks one; `reset(options={"task": ...})` names one.

    ## Episode End

    1. Termination: the agent submits (`end_reason="submitted"`).
    2. Termination: every verifier passes, unless `end_on_solved=False` (`"solved"`). If `test.sh` then disagrees, the episode has
       ended all the same, with the lower count.
    3. Truncation: `max_turns`, `time_limit_s` or `byte_limit` is used up (`"turn_limit"`, `"time_limit"`, `"byte_limit"`).
    4. Truncation: the machinery failed (`"infra_failure"`). The reward is 0.0, `info["infra_error"]` says what broke, and the episode must
       not be trained on.

    ## Arguments

    | Argument | Default | Meaning |
    |---|---|---|
    | `task` | `"seeds/hello-file"` | Id, path of a task directory, glob, `"families/<name>?level=2"`, `Task`, or a list of those |
    | `sandbox` | `"local"` | Backend name, or a callable from `SandboxSpec` to a `Sandbox` that is not started |
    | `reward` | `"delta"` | See Rewards |
    | `gamma` | `None` | Discount of the potential-based reward |
    | `end_on_solved` | `True` | Whether passing every verifier ends the episode |
    | `max_turns` | `300` | Steps |
    | `time_limit_s` | `None` | Wall-clock seconds of the episode |
    | `byte_limit` | `None` | Bytes of terminal output of the episode |
    | `step_timeout_s` | `30.0` | Seconds a command may take |
    | `max_output_bytes` | `16384` | Bytes of output kept each step |
    | `rows`, `cols` | `24`, `80` | Size of the terminal |
    | `verify` | `"change"` | When verifiers run: after steps that changed the filesystem, `"step"`, `"end"`, or every so many steps |
    | `verify_async` | `False` | Whether a step returns while its verifiers still run; see Late Rewards |
    | `confirm` | `False` | Whether the verifiers run a second time when one newly passes: what does not pass again does not count |
    | `verbatim` | `True` | Whether the task's own `test.sh` is run at the end of an episode; if it disagrees, the lower count is paid |
    | `render_mode` | `None` | `"ansi"`: `render()` returns the screen; `"human"`: every step is printed |
    | `timing` | `True` | Whether `info["_timing"]` is filled |
    | `retries` | `1` | How often a failed reset or verification is tried again |

    ## Info

    | Key | Type | Meaning |
    |---|---|---|
    | `schema_version` | `str` | Version of these records |
    | `task_id` | `str` | Task being played |
    | `instruction` | `str` | The whole instruction |
    | `isolation` | `str` | `"namespaces"`, `"container"`, `"remote"` or `"none"` |
    | `state` | `str` | Name of the shell's state |
    | `verifiers_passed` | `int` | Verifiers that pass, as of the last verification |
    | `verifiers_total` | `int` | Verifiers of the task |
    | `verifiers` | `dict[str, bool]` | Verifier id -> whether it passes |
    | `verifier_source` | `str` | Where the verdicts came from: `"runner"`, or what `test.sh` left if that is what is paid |
    | `verbatim` | `dict[str, str]` | What `test.sh` said: `verdict` (a `VerbatimVerdict`, `"not_run"` before the end), `source`, `note` |
    | `unknown` | `tuple[str, ...]` | Ids that the verifiers reported but that are not among the task's; they never count |
    | `tainted` | `tuple[str, ...]` | Verifiers that passed in a process that had loaded code of the agent; they count |
    | `flaky` | `tuple[str, ...]` | Verifiers that passed once and not again (`confirm=True`): they do not count |
    | `reward_terms` | `dict[str, float]` | Parts of the reward |
    | `reward_pending` | `bool` | The verifiers of this step still run: the next step carries its reward |
    | `late_reward` | `dict` | What the step before earned: `turn` (0: nothing is late), `reward`, `terms`, `verifiers_passed` |
    | `action_executed` | `bool` | `False` after a reset, and where the step before turned out to have ended the episode |
    | `end_reason` | `str` or `None` | See Episode End |
    | `infra_error` | `str` or `None` | What broke |
    | `incidents` | `tuple[str, ...]` | What befell the connection to a remote sandbox, e.g. that it broke and was made anew |
    | `tamper` | `tuple[str, ...]` | Files of the base system (`/usr`, `/etc` ...) that the agent changed, shadowed or removed |
    | `_timing` | mapping | Seconds by phase; the only part that differs between two runs of the same actions |

    ## Vectorized environment

    `gym.make_vec("T1Terminal-v0", num_envs=4, task=...)` runs one environment a thread (`TerminalVectorEnv`). Text comes back as tuples.
    `vectorization_mode="sync"` works as well. Gymnasium's async mode needs `vector_kwargs={"shared_memory": False}`: with shared memory
    it returns stale text.

    ## Version History

    - v0: first version
    """

    metadata = {"render_modes": ["ansi", "human"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        task: TaskSpec = "seeds/hello-file",
        *,
        sandbox: Any = "local",
        reward: Any = "delta",
        gamma: float | None = None,
        end_on_solved: bool = True,
        max_turns: int = 300,
        time_limit_s: float | None = None,
        byte_limit: int | None = None,
        step_timeout_s: float = 30.0,
        max_output_bytes: int = 16384,
        rows: int = 24,
        cols: int = 80,
        verify: str | int = "change",
        verify_async: bool = False,
        confirm: bool = False,
        verbatim: bool = True,
        render_mode: str | None = None,
        timing: bool = True,
        retries: int = 1,
    ) -> None:
        self._machine: Machine | None = None
        self.config = EnvConfig(
            sandbox=sandbox,
            reward=reward,
            gamma=gamma,
            end_on_solved=end_on_solved,
            max_turns=max_turns,
            time_limit_s=time_limit_s,
            byte_limit=byte_limit,
            step_timeout_s=step_timeout_s,
            max_output_bytes=max_output_bytes,
            rows=rows,
            cols=cols,
            verify=verify,
            verify_async=verify_async,
            confirm=confirm,
            verbatim=verbatim,
            render_mode=render_mode,
            timing=timing,
            retries=retries,
        )
        self.render_mode = render_mode
        self.observation_space = observation_space(rows, cols, max_output_bytes)
        self.action_space = TerminalAction()
        self.task: Task | None = None
        self._factory = sandbox_factory(sandbox)
        self._reward = make_reward(reward, gamma)
        self._budget = Budget(max_turns=max_turns, time_limit_s=time_limit_s, byte_limit=byte_limit, end_on_solved=end_on_solved)
        self._tasks = resolve_tasks(task)
        self._given = {item.id: item for item in (task if isinstance(task, list | tuple) else [task]) if isinstance(item, Task)}
        self._schedule = Schedule(verify)
        self._pending: PendingVerification | None = None
        self._watch = Stopwatch(timing)
        self._episode: Episode | None = None
        self._baseline = self._report = VerifierReport()
        self._isolation = "none"
        self._incidents: tuple[str, ...] = ()
        self._tamper: tuple[str, ...] = ()
        self._verbatim = _verbatim_info(VerbatimVerdict.NOT_RUN)
        self._shell: tuple[ShellState, str] = (ShellState.IDLE, "/")
        self._screen = np.zeros((rows, cols), dtype=np.uint32)

    # ---------------------------------------------------------------------------------------------------------------- reset
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in a new sandbox.

        Args:
            seed: Seeds the choice of the task.
            options: ``{"task": ...}`` names the task of this episode: an id, a path, a family or a ``Task``.

        Returns:
            The first observation, whose ``output`` is the instruction, and the info.

        Raises:
            SandboxUnavailable: This machine cannot run the sandbox.
            TaskError: The task is malformed.
            T1Error: The machinery failed ``retries + 1`` times.
        """
        super().reset(seed=seed)
        task = self._choose(options or {})
        self._close_machine()
        self._watch.read()
        self.task = task
        self._baseline = self._report = self._start(task)
        self._episode = Episode(self._budget)
        assert self._machine is not None, "set by _start"
        self._isolation = self._machine.sandbox.isolation
        self._incidents = self._machine.incidents
        self._tamper, self._verbatim = (), _verbatim_info(VerbatimVerdict.NOT_RUN)
        self._shell = (ShellState.IDLE, to_unicode(self._machine.session.cwd))
        self._screen = self._machine.session.screen()
        observation = self._observe(task.instruction, None)
        self._render_human(observation, "")
        return observation, self._info({}, None)

    def _choose(self, options: dict[str, Any]) -> Task:
        reject_unknown(options, ("task",), "reset option")
        draw = int(self.np_random.integers(2**31))
        asked = options.get("task")
        if asked is None:
            return self._tasks.sample(draw)
        if isinstance(asked, str) and asked in self._given:
            return self._given[asked]
        return resolve_tasks(asked).sample(draw)

    def _start(self, task: Task) -> VerifierReport:
        for attempt in range(self.config.retries + 1):
            machine = Machine(task, self._factory, self._shell_config(), verify_retries=self.config.retries, confirm=self.config.confirm)
            try:
                baseline = machine.start(self._watch)
            except (SandboxUnavailable, ImageBuildError):
                machine.close()
                raise
            except (SandboxError, ShellError, VerifierError):
                machine.close()
                if attempt == self.config.retries:
                    raise
            except BaseException:
                machine.close()
                raise
            else:
                self._machine = machine
                return baseline
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _shell_config(self) -> ShellConfig:
        config = self.config
        return ShellConfig(rows=config.rows, cols=config.cols, max_output_bytes=config.max_output_bytes, timeout_s=config.step_timeout_s)

    # ----------------------------------------------------------------------------------------------------------------- step
    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take one action.

        Args:
            action: A member of ``action_space``.

        Returns:
            Observation, reward, whether the episode terminated, whether it was truncated, and the info.

        Raises:
            gymnasium.error.ResetNeeded: There is no episode, or it has ended.
            gymnasium.error.InvalidAction: The action is not a member of the action space.
        """
        episode, machine = self._require_episode()
        chosen = _checked_action(action)
        late = self._take_late(episode, machine)
        if episode.end_reason is not None:  # known only now: what was to be done next is not done
            terms = late.added_to({})
            observation = self._observe("", None)
            info = self._info(terms, episode.end_reason, late.infra_error, late=late)
            return observation, total(terms), episode.terminated, episode.truncated, info
        previous = self._report
        error: str | None = None
        result: ShellResult | None = None
        try:
            result = self._act(machine, chosen, episode)
            output_bytes = result.output_bytes if result is not None else 0
            self._verify(machine, episode.turns + 1, last=isinstance(chosen, Submit) or _may_be_last(episode, output_bytes))
            error, self._incidents = self._report.infra_error, machine.incidents
        except (SandboxError, ShellError, VerifierError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is not None:
            self._report = previous
        end_reason = episode.finish_turn(
            output_bytes=result.output_bytes if result is not None else 0,
            submitted=isinstance(chosen, Submit),
            solved=self._report.solved and self._pending is None,
            infra_failure=error is not None,
        )
        if self._pending is not None and end_reason is not None:  # time ran out after all
            mine = self._take_late(episode, machine)
            terms, error, end_reason = dict(mine.terms), mine.infra_error, episode.end_reason
        elif self._pending is not None:
            terms = {PENDING_TERM: 0.0}
        else:
            if self.config.verbatim and end_reason is not None and error is None:
                self._verbatim = self._settle(machine)
            terms = self._reward(RewardInput(self._baseline, previous, self._report, end_reason))
        if error is not None:
            self._give_up()
        terms = late.added_to(terms)
        observation = self._observe(result.output if result is not None else "", result.exit_code if result is not None else None)
        self._render_human(observation, chosen)
        info = self._info(terms, end_reason, error, late=late, executed=True)
        return observation, total(terms), episode.terminated, episode.truncated, info

    def collect_late_reward(self) -> dict[str, Any]:
        """Wait for the verifiers that the last step left running (``verify_async=True``), without taking another step.

        For callers that end episodes themselves, and for those that want to know whether the episode is over before they decide on an
        action. The next step does not carry the reward again.

        Returns:
            The info. ``late_reward`` says what the last step earned (``turn`` 0: nothing was left running), ``end_reason`` whether the
            episode ended with it; if it did, `reset` comes next.

        Raises:
            gymnasium.error.ResetNeeded: There is no episode, or it ended before.
        """
        episode, machine = self._require_episode()
        late = self._take_late(episode, machine)
        return self._info(late.added_to({}), episode.end_reason, late.infra_error, late=late)

    def _take_late(self, episode: Episode, machine: Machine) -> LateReward:
        """Wait for the verifiers of the last step, if they still run, and do what had to wait for them."""
        if self._pending is None:
            return NOTHING_LATE
        previous, error = self._report, None
        try:
            with self._watch.phase("wait"):
                report = self._pending.wait()
            error, self._incidents = report.infra_error, machine.incidents
            self._report = report if error is None else previous
        except (SandboxError, VerifierError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._watch.add("late_verify", self._pending.seconds)
        self._pending = None
        end_reason = episode.finish_late(solved=self._report.solved and error is None, infra_failure=error is not None)
        if self.config.verbatim and end_reason is not None and error is None:
            self._verbatim = self._settle(machine)
        terms = self._reward(RewardInput(self._baseline, previous, self._report, end_reason))
        if error is not None:
            self._give_up()
        return LateReward(episode.turns, total(terms), terms, self._report.passed, error)

    def _give_up(self) -> None:
        """After a failure of the machinery: nothing more can be done on this machine."""
        self._close_machine()
        self._shell = (ShellState.SANDBOX_DEAD, self._shell[1])

    def _require_episode(self) -> tuple[Episode, Machine]:
        if self._episode is None:
            raise gym.error.ResetNeeded("no episode is being played: call reset() before step()")
        if self._episode.end_reason is not None:
            reason = self._episode.end_reason.value
            raise gym.error.ResetNeeded(f"the episode has ended ({reason}): call reset() before the next step()")
        if self._machine is None:
            raise gym.error.ResetNeeded("the environment was closed: call reset() before step()")
        return self._episode, self._machine

    def _act(self, machine: Machine, action: Command | Keys | Submit, episode: Episode) -> ShellResult | None:
        """Carry out the action in the shell; None for ``Submit``."""
        if isinstance(action, Submit):
            return None
        with self._watch.phase("command"):
            if isinstance(action, Keys):
                result = machine.session.keys(action.text, action.wait_s)
            else:
                timeout_s = self.config.step_timeout_s if action.timeout_s is None else action.timeout_s
                remaining_s = episode.remaining_s
                result = machine.session.run(action.text, timeout_s if remaining_s is None else max(0.1, min(timeout_s, remaining_s)))
        self._shell = (result.state, to_unicode(result.cwd))
        with self._watch.phase("screen"):
            self._screen = machine.session.screen()
        return result

    def _verify(self, machine: Machine, turn: int, *, last: bool) -> None:
        """Run the verifiers, or begin to, if the configuration asks for it now; ``SandboxDied`` if there is no sandbox."""
        if self._shell[0] is ShellState.SANDBOX_DEAD or not machine.sandbox.alive:
            raise SandboxDied("the sandbox ended during this step")
        if not (last if machine.verifies_at_the_end_only else self._schedule.is_due(turn, last=last)):
            return
        changed = machine.changed(self._watch)
        if changed:
            self._tamper = machine.tampered(self._watch)
        elif not self._schedule.unchanged_too:
            return
        if self.config.verify_async and not last:
            self._pending = machine.verify_later(self._watch, self._report)
        else:
            self._report = machine.verify(self._watch, self._report)

    def _settle(self, machine: Machine) -> dict[str, str]:
        """Let the task's ``test.sh`` speak at the end: the report becomes what is to be paid. Returns ``info["verbatim"]``."""
        try:
            settled = machine.settle(self._report, self._watch)
        except (SandboxError, OSError) as failure:  # the verifiers have spoken: what breaks after them takes nothing back
            return _verbatim_info(VerbatimVerdict.INFRA_FAILURE, note=f"{type(failure).__name__}: {failure}")
        self._report = settled.report
        return _verbatim_info(settled.verdict, settled.source, settled.note or "; ".join(settled.differences))

    # ------------------------------------------------------------------------------------------------- what is handed out
    def _observe(self, output: str, exit_code: int | None) -> Observation:
        state, cwd = self._shell
        max_chars = self.observation_space["output"].max_length  # type: ignore[index]
        return {
            "cwd": clip_text(cwd, MAX_CWD_CHARS),
            "exit_code": np.array(NO_EXIT_CODE if exit_code is None else min(max(exit_code, 0), 255), dtype=np.int32),
            "output": clip_text(to_unicode(output), max_chars),
            "screen": self._screen.astype(np.uint32, copy=True),
            "state": SHELL_STATES.index(state),
            "turn": np.array(self._episode.turns if self._episode is not None else 0, dtype=np.int32),
        }

    def _info(
        self,
        terms: dict[str, float],
        end_reason: EndReason | None,
        infra_error: str | None = None,
        *,
        late: LateReward = NOTHING_LATE,
        executed: bool = False,
    ) -> dict[str, Any]:
        assert self.task is not None, "only called after a reset"
        return {
            "schema_version": SCHEMA_VERSION,
            "task_id": self.task.id,
            "instruction": self.task.instruction,
            "isolation": self._isolation,
            "state": self._shell[0].value,
            "verifiers_passed": self._report.passed,
            "verifiers_total": self._report.total,
            "verifiers": self._report.as_bools(),
            "verifier_source": self._report.source,
            "verbatim": dict(self._verbatim),
            "unknown": self._report.unknown,
            "tainted": self._report.tainted,
            "flaky": self._report.flaky,
            "reward_terms": dict(terms),
            "reward_pending": self._pending is not None,
            "late_reward": late.as_info(),
            "action_executed": executed,
            "end_reason": None if end_reason is None else end_reason.value,
            "infra_error": infra_error,
            "incidents": self._incidents,
            "tamper": tuple(sorted({*self._tamper, *self._report.masked})),
            "_timing": self._watch.read(),
        }

    # ------------------------------------------------------------------------------------------------------ render and close
    def render(self) -> str | None:
        """Return the screen as text (``"ansi"``); ``"human"`` prints every step by itself and returns None."""
        if self.render_mode is None:
            gym.logger.warn("render() was called without a render_mode; pass render_mode='ansi' or 'human' when making the environment")
            return None
        return "\n".join(screen_lines(self._screen)) if self.render_mode == "ansi" else None

    def _render_human(self, observation: Observation, action: Action | str) -> None:
        if self.render_mode != "human":
            return
        typed = f"$ {action.text}\n" if isinstance(action, Command | Keys) else "<submit>\n" if isinstance(action, Submit) else ""
        sys.stdout.write(f"{typed}{observation['output'].rstrip()}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """End the episode and remove the sandbox. Idempotent."""
        self._close_machine()

    def _close_machine(self) -> None:
        machine, self._machine = self._machine, None
        self._pending = None
        if machine is not None:
            machine.close()

    def __del__(self) -> None:
        machine = getattr(self, "_machine", None)
        if machine is not None:
            # The interpreter may be going down; the sandbox dies with this process anyway.
            with contextlib.suppress(T1Error, OSError):
                machine.close()


def _may_be_last(episode: Episode, output_bytes: int) -> bool:
    """Whether the step in progress ends the episode, or could because its time runs out before the step is over."""
    remaining_s = episode.remaining_s
    return episode.will_reach_a_limit(output_bytes) or (remaining_s is not None and remaining_s < _STEP_MARGIN_S)


def _verbatim_info(verdict: VerbatimVerdict, source: str = "", note: str = "") -> dict[str, str]:
    """The same keys and types on every step: a None that becomes a dict at the end would break Gymnasium's batching of infos."""
    return {"verdict": verdict.value, "source": source, "note": note[:_MAX_NOTE_CHARS]}


def _checked_action(action: Any) -> Command | Keys | Submit:
    """Return the full form of an action, lone surrogates replaced, or raise ``InvalidAction``."""
    if isinstance(action, Submit):
        return action
    text = action.text if isinstance(action, Command | Keys) else action
    if not isinstance(text, str):
        raise gym.error.InvalidAction(f"action {action!r} is a {type(action).__name__}; expected a str, Command, Keys or Submit")
    if len(text) > MAX_ACTION_CHARS:
        raise gym.error.InvalidAction(f"the action has {len(text)} characters; expected at most {MAX_ACTION_CHARS}")
    text = to_unicode(text)
    if isinstance(action, Keys):
        return Keys(text, action.wait_s)
    return Command(text, action.timeout_s if isinstance(action, Command) else None)
