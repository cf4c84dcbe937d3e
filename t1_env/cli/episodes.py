"""``t1-env play`` and ``t1-env run``: one episode, step by step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from rich.console import Console
from rich.table import Table
from rich.text import Text

from t1_env.env import TerminalEnv
from t1_env.protocol import SHELL_STATES, Action, Keys, ShellState, Submit, VerbatimVerdict
from t1_env.spaces import NO_EXIT_CODE
from t1_env.tasks import Task
from t1_env.testing import Rollout, noop_actions, oracle_actions, rollout
from t1_env.wrappers import RecordEpisode
from t1_env.wrappers.record import screen_lines

EXIT_OK, EXIT_FAILED = 0, 1
_LINE_CHARS = 100


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """What ``play`` and ``run`` have in common.

    Args:
        task: Id, path or family.
        seed: Seed of the reset.
        sandbox: Backend name.
        reward: Reward mode.
        max_turns: Steps until truncation.
        step_timeout_s: Time limit of a command in seconds.
        record: Directory for a transcript, or None.
    """

    task: str
    seed: int = 0
    sandbox: str = "local"
    reward: str = "delta"
    max_turns: int = 300
    step_timeout_s: float = 30.0
    record: str | None = None

    def make(self) -> gym.Env[Any, Any]:
        """Return the environment, recording if asked to."""
        env: gym.Env[Any, Any] = TerminalEnv(
            task=self.task,
            sandbox=self.sandbox,
            reward=self.reward,
            max_turns=self.max_turns,
            step_timeout_s=self.step_timeout_s,
        )
        return env if self.record is None else RecordEpisode(env, self.record)


def verifier_table(info: dict[str, Any]) -> Table:
    """Return the verifiers of an ``info`` as a table."""
    table = Table(title=f"verifiers: {info['verifiers_passed']} of {info['verifiers_total']} pass", title_justify="left")
    table.add_column("")
    table.add_column("verifier", overflow="fold")
    for name, passed in info["verifiers"].items():
        table.add_row(Text("pass", "green") if passed else Text("fail", "red"), Text(name))
    return table


def _summary(episode: Rollout) -> str:
    info = episode.infos[-1]
    reason = info["end_reason"] or "not ended"
    verdict = "infra failure" if episode.infra_failure else "solved" if episode.solved else "not solved"
    turns = len(episode.rewards)
    said = f"{verdict} after {turns} step{'' if turns == 1 else 's'} ({reason}), return {sum(episode.rewards):+g}"
    script = info["verbatim"]
    if script["verdict"] in (VerbatimVerdict.AGREES, VerbatimVerdict.NOT_RUN):
        return said
    return f"{said}\ntest.sh {script['verdict'].replace('_', ' ')}: {script['note']}"


# ------------------------------------------------------------------------------------------------------------------------- run
def run_command(options: EpisodeOptions, *, agent: str) -> int:
    """Let a scripted agent play and print one line a step, then the verifier table.

    Args:
        options: The episode.
        agent: ``"oracle"`` or ``"noop"``.

    Returns:
        0, or 1 when the machinery failed or the oracle did not solve its own task.
    """
    console = Console(highlight=False, soft_wrap=True)

    def actions() -> Iterator[Action]:
        # A generator, because only the reset decides which task of a family is played.
        task = _task_of(env)
        chosen = oracle_actions(task) if agent == "oracle" else noop_actions()
        console.print(f"{task.id}: {agent} agent, seed {options.seed}, reward {options.reward}", markup=False)
        console.print("step   reward  passed  exit  action", markup=False)
        yield from chosen

    with options.make() as env:
        episode = rollout(env, actions(), seed=options.seed, on_step=lambda episode: console.print(_step_line(episode), markup=False))
    info = episode.infos[-1]
    console.print(_summary(episode), markup=False)
    console.print(verifier_table(info))
    _print_recorded(console, env)
    if episode.infra_failure:
        print(f"t1-env: the machinery failed: {info['infra_error']}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK if episode.solved or agent == "noop" else EXIT_FAILED


def _task_of(env: gym.Env[Any, Any]) -> Task:
    inner = env.unwrapped
    assert isinstance(inner, TerminalEnv), "made by EpisodeOptions.make"
    assert inner.task is not None, "only asked after the reset"
    return inner.task


def _step_line(episode: Rollout) -> str:
    info, observation = episode.infos[-1], episode.observations[-1]
    exit_code = int(observation["exit_code"])
    shown_exit = "-" if exit_code == NO_EXIT_CODE else str(exit_code)
    passed = f"{info['verifiers_passed']}/{info['verifiers_total']}"
    return f"{len(episode.rewards):>4}  {episode.rewards[-1]:>+7.3g}  {passed:>6}  {shown_exit:>4}  {_one_line(episode.actions[-1])}"


def _one_line(action: Action) -> str:
    if isinstance(action, Submit):
        return "<submit>"
    if isinstance(action, Keys):
        return f"<keys {action.text}>"
    text = action if isinstance(action, str) else action.text
    shown = text.strip().replace("\n", " \\n ")
    return shown if len(shown) <= _LINE_CHARS else f"{shown[: _LINE_CHARS - 3]}..."


def _print_recorded(console: Console, env: gym.Env[Any, Any]) -> None:
    if isinstance(env, RecordEpisode) and env.last_path is not None:
        console.print(f"transcript: {env.last_path}", markup=False)


# ------------------------------------------------------------------------------------------------------------------------ play
def play_command(options: EpisodeOptions) -> int:
    """Let a person (or a pipe) play a task.

    Args:
        options: The episode.

    Returns:
        0, or 1 when the machinery failed.
    """
    console = Console(highlight=False, soft_wrap=True)
    with options.make() as env:
        episode = Rollout()
        observation, info = env.reset(seed=options.seed)
        episode.observations.append(observation)
        episode.infos.append(info)
        console.print(Text(f"{info['task_id']}: {info['verifiers_total']} verifiers; :submit ends the episode, :quit leaves it", "bold"))
        console.print(observation["output"].strip(), markup=False)
        for action in _typed_actions(console, episode):
            observation, reward, episode.terminated, episode.truncated, info = env.step(action)
            episode.actions.append(action)
            episode.observations.append(observation)
            episode.infos.append(info)
            episode.rewards.append(float(reward))
            _show_step(console, observation)
            if episode.ended:
                break
    console.print(_summary(episode), markup=False)
    console.print(verifier_table(info))
    _print_recorded(console, env)
    if episode.infra_failure:
        print(f"t1-env: the machinery failed: {info['infra_error']}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _show_step(console: Console, observation: dict[str, Any]) -> None:
    output = observation["output"]
    if output:
        console.print(output, end="" if output.endswith("\n") else "\n", markup=False)
    exit_code, state = int(observation["exit_code"]), SHELL_STATES[int(observation["state"])]
    notes = [f"exit {exit_code}"] if exit_code > 0 else []
    if state is not ShellState.IDLE:
        notes.append(state.value.replace("_", " "))
    if notes:
        console.print(Text(f"[{', '.join(notes)}]", "yellow"))


def _typed_actions(console: Console, episode: Rollout) -> Iterator[Action]:
    """Read actions from standard input until it ends or the player leaves."""
    interactive = sys.stdin.isatty()
    while True:
        observation = episode.observations[-1]
        prompt = f"[{int(observation['turn']) + 1}] {observation['cwd']} $ "
        try:
            line = input(prompt) if interactive else input()
        except EOFError:
            yield Submit()
            return
        if not interactive:
            console.print(f"{prompt}{line}", markup=False)
        word, _, rest = line.strip().partition(" ")
        match word:
            case ":submit":
                yield Submit()
                return
            case ":quit":
                return
            case ":screen":
                console.print("\n".join(screen_lines(observation["screen"])), markup=False)
            case ":keys" if rest.strip():
                yield Keys(rest.strip())
            case "":
                continue
            case _ if word.startswith(":") and word != ":":
                console.print("commands: :submit, :quit, :screen, :keys KEY (for example :keys C-c)", markup=False)
            case _:
                yield line
