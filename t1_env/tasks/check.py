"""Is a task sound? Lints that need no sandbox, then episodes: the oracle passes every verifier, doing nothing passes none.

At the end of each episode the task's own ``test.sh`` must say what the verifiers say.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from t1_env.errors import SandboxUnavailable, T1Error, TaskError
from t1_env.protocol import VerbatimVerdict
from t1_env.tasks.task import Task, read_text

VERIFIERS_MIN, VERIFIERS_MAX = 3, 10
"""How many verifiers a task of the corpus has."""

_CANARY: Final = re.compile(r"canary", re.IGNORECASE)
_TEST_LIBRARIES: Final = frozenset({"pytest"})


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What ``check_task`` found.

    Args:
        task_id: The task.
        problems: What is wrong with it; empty for a sound task.
        n_verifiers: Number of its verifiers, 0 if they could not be collected.
        n_steps: Number of oracle steps.
        n_slips: Number of its slips.
        requires: Programs it needs in the sandbox.
    """

    task_id: str
    problems: tuple[str, ...]
    n_verifiers: int
    n_steps: int
    n_slips: int
    requires: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def lint_task(task: Task) -> tuple[str, ...]:
    """What can be said about a task without playing it.

    Args:
        task: The task.

    Returns:
        Problems, in words; empty if there are none.
    """
    problems = []
    name = task.config.task.name.rpartition("/")[2] if task.config.task is not None else None
    if name is None:
        problems.append("task.toml has no [task] name")
    elif task.metadata.family is None and name != task.path.name:
        problems.append(f"task.name ends in {name!r}, but the directory is {task.path.name!r}")
    for script in ("tests/test.sh", "solution/solve.sh"):
        if not (task.path / script).is_file():
            problems.append(f"{script} is missing")
    try:
        if not task.oracle_steps():
            problems.append("the oracle has no steps")
        task.slips()
    except TaskError as error:
        problems.append(str(error))
    dockerfile = task.environment_dir / "Dockerfile"
    if dockerfile.is_file() and not re.search(r"^\s*FROM\s+\S", read_text(dockerfile), re.MULTILINE | re.IGNORECASE):
        problems.append("environment/Dockerfile has no FROM line")
    for path in sorted(task.path.rglob("*")):
        if path.suffix in (".md", ".py", ".sh", ".toml") and path.is_file() and _CANARY.search(read_text(path)):
            problems.append(f"{path.relative_to(task.path)} holds a canary of another corpus")
    for path in sorted(task.tests_dir.glob("test_*.py")):
        problems.extend(_lint_tests(path))
    return tuple(problems)


def _lint_tests(path: Path) -> list[str]:
    """Tests must parse, import nothing but the standard library and pytest, and say what they check."""
    try:
        tree = ast.parse(read_text(path))
    except SyntaxError as error:
        return [f"tests/{path.name}, line {error.lineno}: {error.msg}"]
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        else:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and not ast.get_docstring(node):
                problems.append(f"tests/{path.name}, line {node.lineno}: {node.name} does not say which requirement it checks")
            continue
        for module in modules:
            if module.partition(".")[0] not in sys.stdlib_module_names | _TEST_LIBRARIES:
                problems.append(f"tests/{path.name}, line {node.lineno}: imports {module!r}, which a sandbox's verifiers cannot count on")
    return problems


def check_task(task: Task, *, sandbox: str = "local", slips: bool = False) -> TaskCheck:
    """Lint a task, then play it.

    Args:
        task: The task.
        sandbox: Backend to play it on.
        slips: Whether to play every slip too: each must cost at least one verifier.

    Returns:
        What was found. A task that cannot be played is a problem, not an exception.

    Raises:
        SandboxUnavailable: This machine cannot run the sandbox, so nothing can be said.
    """
    problems = list(lint_task(task))
    steps: list[str] = []
    n_verifiers = n_slips = 0
    try:
        steps, all_slips = list(task.oracle_steps()), task.slips()
        n_slips = len(all_slips)
        scripts = {"": steps}
        for slip in all_slips if slips else ():
            scripts[f"slip {slip.kind!r} at step {slip.step}"] = [*steps[: slip.step], slip.command, *steps[slip.step + 1 :]]
        n_verifiers, found = _play(task, scripts, sandbox=sandbox)
        problems += found
    except SandboxUnavailable:
        raise
    except T1Error as error:
        if str(error) not in problems:
            problems.append(" ".join(str(error).split()))
    if n_verifiers and not VERIFIERS_MIN <= n_verifiers <= VERIFIERS_MAX:
        problems.append(f"it has {n_verifiers} verifiers; expected {VERIFIERS_MIN} to {VERIFIERS_MAX}")
    return TaskCheck(task.id, tuple(problems), n_verifiers, len(steps), n_slips, task.metadata.requires)


def _play(task: Task, scripts: dict[str, list[str]], *, sandbox: str) -> tuple[int, list[str]]:
    """Play nothing, then each script (the one called ``""`` is the oracle); returns the number of verifiers and the problems."""
    # Imported here: the environment imports this package, and lints must work without it.
    import gymnasium as gym

    from t1_env.testing import noop_actions, rollout

    longest = max(map(len, scripts.values()))
    problems = []
    env = gym.make("t1_env:T1Terminal-v0", task=task, sandbox=sandbox, max_turns=longest + 1, verify="end", disable_env_checker=True)
    try:
        idle = rollout(env, noop_actions(), seed=0)
        verifiers: dict[str, bool] = idle.infos[-1]["verifiers"]
        if idle.infra_failure:
            problems.append(f"doing nothing: the machinery failed: {idle.infos[-1]['infra_error']}")
        elif any(verifiers.values()):
            problems.append(f"doing nothing passes {', '.join(name for name, passed in verifiers.items() if passed)}")
        problems += _script_problems(task, "doing nothing", idle.infos[-1])
        for kind, commands in scripts.items():
            episode = rollout(env, [*commands, *noop_actions()], seed=0)
            last = episode.infos[-1]
            if episode.infra_failure:
                problems.append(f"{kind or 'the oracle'}: the machinery failed: {last['infra_error']}")
            elif not kind and not episode.solved:
                problems.append(f"the oracle fails {', '.join(name for name, passed in last['verifiers'].items() if not passed)}")
            elif kind and episode.solved:
                problems.append(f"the {kind} costs no verifier")
            problems += _script_problems(task, f"the {kind or 'oracle'}", last)
    finally:
        env.close()
    return len(verifiers), problems


def _script_problems(task: Task, episode: str, info: dict[str, Any]) -> list[str]:
    """Whether the task's own script said at the end of an episode what the verifiers said."""
    if not (task.tests_dir / "test.sh").is_file():
        return []  # a lint already
    verdict, note = VerbatimVerdict(info["verbatim"]["verdict"]), info["verbatim"]["note"]
    if verdict is VerbatimVerdict.DISAGREES:
        return [f"{episode}: test.sh disagrees with the verifiers: {note}"]
    if verdict in (VerbatimVerdict.NO_VERDICT, VerbatimVerdict.INFRA_FAILURE):
        return [f"{episode}: test.sh gives no verdict: {note}"]
    return []
