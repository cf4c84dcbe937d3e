"""The machine an episode is played on: a sandbox with the task's environment built in it, its frozen verifiers and one shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, TypedDict, runtime_checkable

from t1_env.declared import SOURCE as DECLARED
from t1_env.declared import DeclaredPath, PristineSandbox, can_be_cloned, declared_paths, fetch, pristine
from t1_env.errors import ShellError, VerifierError
from t1_env.protocol import VerifierReport
from t1_env.sandbox.base import BuiltEnvironment, ImageSource, ReportsIncidents, Sandbox, SandboxSpec
from t1_env.sandbox.registry import make_sandbox, sandbox_names
from t1_env.shell import Session, ShellConfig
from t1_env.tasks import Task
from t1_env.tasks.corpus import corpus_root
from t1_env.tasks.families import cache_dir
from t1_env.timing import Stopwatch
from t1_env.verification import PendingVerification
from t1_env.verifiers.baseline import baseline
from t1_env.verifiers.classes import needs_live_processes
from t1_env.verifiers.runner import literal_env, run
from t1_env.verifiers.verbatim import Settlement, run_verbatim, settle

DEFAULT_STORAGE_MB: Final = 1024
DEFAULT_MEMORY_MB: Final = 2048
MAX_STORAGE_MB: Final = 4096
"""What the sandbox writes lives in memory, so a task that asks for ten gigabytes of disk gets this much."""


class Surroundings(TypedDict):
    """What verifiers and test script find around them."""

    env: Mapping[str, str]
    workdir: str


class SandboxFactory(Protocol):
    """Makes a sandbox that is not started yet."""

    def __call__(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox for this specification."""


@dataclass(frozen=True, slots=True)
class NamedBackend:
    """The factory of a backend that was asked for by name.

    Args:
        name: Of the backend.
    """

    name: str

    def __call__(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox for this specification."""
        return make_sandbox(self.name, spec)


@runtime_checkable
class SeesSystemChanges(Protocol):
    """A sandbox that can say which files of its base system were changed (not every backend can)."""

    def system_changes(self) -> dict[str, str]:
        """Return path -> a mark that changes whenever the file does."""


def sandbox_factory(sandbox: str | SandboxFactory) -> SandboxFactory:
    """Return the factory of a backend.

    Args:
        sandbox: Name of a backend, or a factory of the caller's own.

    Returns:
        The factory.

    Raises:
        ConfigError: If there is no backend of this name.
        SandboxUnavailable: If this version cannot run it.
    """
    if not isinstance(sandbox, str):
        return sandbox
    if sandbox != "local" and sandbox not in sandbox_names():
        make_sandbox(sandbox)  # raises and says why
    return NamedBackend(sandbox)


def sandbox_spec(task: Task) -> SandboxSpec:
    """Return the sandbox a task asks for. Every host directory that holds tasks is hidden.

    The network stays off unless the task asks for it in so many words (``[agent]`` has the last one, as it is the agent that works there).
    """
    environment, agent = task.config.environment, task.config.agent
    return SandboxSpec(
        # Only the build knows what a variable in WORKDIR stands for; until then no directory of that literal name is made.
        workdir="/" if "$" in task.workdir and environment.workdir is None else task.workdir,
        env=literal_env(environment.env),
        memory_mb=environment.memory_limit_mb or DEFAULT_MEMORY_MB,
        storage_mb=min(environment.storage_limit_mb or DEFAULT_STORAGE_MB, MAX_STORAGE_MB),
        cpus=environment.cpus,
        network=environment.asks_for_network if agent.network_mode is None else agent.network_mode == "public",
        image=ImageSource(task.environment_dir, environment.docker_image, environment.build_timeout_sec),
        hide=_task_directories(task),
    )


def _task_directories(task: Task) -> tuple[Path, ...]:
    return tuple(dict.fromkeys((task.path, corpus_root(), cache_dir())))


class Machine:
    """One episode's sandbox, verifiers and shell. Made fresh for every episode; nothing of it outlives ``close``.

    Args:
        task: The task.
        factory: Makes the sandbox.
        shell: Configuration of the shell.
        verify_retries: How often a verification that failed as infrastructure is tried again.
        confirm: Whether a verifier that newly passes must pass twice.
    """

    def __init__(self, task: Task, factory: SandboxFactory, shell: ShellConfig, *, verify_retries: int, confirm: bool = False) -> None:
        self.task = task
        self.sandbox = factory(sandbox_spec(task))
        self.verifier_ids: tuple[str, ...] = ()
        self._backend = factory.name if isinstance(factory, NamedBackend) else None
        self._shell_config = shell
        self._session: Session | None = None
        self._verify_retries = verify_retries
        self._confirm = confirm
        self._verified_generation: str | None = None
        self._built = BuiltEnvironment()
        self._built_system: dict[str, str] = {}
        self._pending: PendingVerification | None = None
        self._declared: tuple[DeclaredPath, ...] | None = None
        self._copy: PristineSandbox | None = None
        self._problems: tuple[str, ...] = ()
        self._is_live = False

    @property
    def workdir(self) -> str:
        """Where shell and verifiers start: ``[environment] workdir`` of the task if it sets one, else what the build left."""
        return self.task.config.environment.workdir or self._built.workdir or self.task.workdir

    @property
    def session(self) -> Session:
        """The shell."""
        if self._session is None:
            raise ShellError("the shell was not started: call start() first")
        return self._session

    def start(self, watch: Stopwatch) -> VerifierReport:
        """Start the sandbox, build the environment, freeze the verifiers, count what passes untouched, start the shell.

        Args:
            watch: Counts the seconds of each phase.

        Returns:
            The report on the untouched environment.

        Raises:
            SandboxError: The sandbox could not be started or built.
            SandboxUnavailable: It has no verification clones, and the task declares no paths that could be verified without.
            TaskError: The verifiers cannot be collected.
            VerifierError: The machinery failed while they ran.
            ShellError: The shell could not be started.
        """
        with watch.phase("sandbox"):
            self.sandbox.start()
            self._built = self.sandbox.built
        if not can_be_cloned(self.sandbox):
            self._declared = declared_paths(self.task, self.workdir)
        with watch.phase("fingerprint"):
            self._built_system = self._system_changes()
            self._verified_generation = self.sandbox.generation() if self._declared is None else None
        with watch.phase("verify"):
            self.verifier_ids, report = self._baseline()
            # Verdicts on what a server answers are no function of the files: an unchanged filesystem says nothing about them.
            self._is_live = needs_live_processes(self.task, self.verifier_ids)
        if report.infra_error is not None:
            raise VerifierError(f"the verifiers of {self.task.id} could not be run on its untouched environment: {report.infra_error}")
        with watch.phase("shell"):
            self._session = Session(self.sandbox, replace(self._shell_config, env=self._shell_env(), cwd=self.workdir))
            self._session.start()
        return report

    @property
    def verifies_at_the_end_only(self) -> bool:
        """Whether there are no clones: then only declared paths can be verified, elsewhere, when the episode is over."""
        return self._declared is not None

    def _baseline(self) -> tuple[tuple[str, ...], VerifierReport]:
        if self._declared is None:
            return baseline(self.sandbox, self.task, backend=self._backend, retries=self._verify_retries, **self._surroundings(self._built))
        with pristine(PristineSandbox(sandbox_spec(self.task))) as untouched:
            ids, report = baseline(
                untouched, self.task, backend="local", retries=self._verify_retries, **self._surroundings(untouched.built)
            )
        return ids, replace(report, source=DECLARED)

    def _surroundings(self, built: BuiltEnvironment) -> Surroundings:
        return {"env": built.env, "workdir": self.task.config.environment.workdir or built.workdir or self.task.workdir}

    def _judged(self) -> tuple[Sandbox, Surroundings]:
        """The sandbox in whose clone verifiers run: the agent's, or a fresh one that has what the agent delivered."""
        if self._declared is None:
            return self.sandbox, self._surroundings(self._built)
        if self._copy is None:
            self._copy = PristineSandbox(sandbox_spec(self.task))
            self._copy.start()
            self._problems = fetch(self.sandbox, self._declared, self._copy)
        return self._copy, self._surroundings(self._copy.built)

    def verify(self, watch: Stopwatch, previous: VerifierReport | None = None) -> VerifierReport:
        """Run the verifiers in a clone of the sandbox as it stands.

        Args:
            watch: Counts the seconds.
            previous: The last report; what passes in it needs no confirmation.

        Returns:
            The report; ``infra_error`` is set when the machinery failed.
        """
        with watch.phase("fingerprint"):
            generation = self.sandbox.generation() if self._declared is None else None
        with watch.phase("verify"):
            return self._run(generation, previous)

    def verify_later(self, watch: Stopwatch, previous: VerifierReport | None = None) -> PendingVerification:
        """Begin to run the verifiers in a clone of the sandbox as it stands.

        The clone stands on the files of the agent, so its processes are let go only when the verifiers are done: nothing may be asked of
        the sandbox before the report was waited for, except ``close``.

        Args:
            watch: Counts the seconds until this returns.
            previous: As for `verify`.

        Returns:
            What to wait for; the report is as that of `verify`.
        """
        with watch.phase("fingerprint"):
            generation = self.sandbox.generation()
        self._pending = PendingVerification(lambda: self._run(generation, previous))
        return self._pending

    def _run(self, generation: str | None, previous: VerifierReport | None) -> VerifierReport:
        sandbox, surroundings = self._judged()
        report = run(
            sandbox,
            self.task,
            self.verifier_ids,
            retries=self._verify_retries,
            confirm=self._confirm,
            previous=previous,
            **surroundings,
        )
        if self._declared is not None:
            report = replace(report, source=DECLARED)
        # Taken before the run: what a background process wrote meanwhile is seen as a change at the next step.
        self._verified_generation = generation if report.infra_error is None else None
        return report

    def settle(self, fast: VerifierReport, watch: Stopwatch) -> Settlement:
        """Run the task's own ``test.sh`` on the sandbox as it stands, and settle it with what the verifiers said.

        Args:
            fast: The last report.
            watch: Counts the seconds.

        Returns:
            The report to pay, and whether both agree.

        Raises:
            SandboxDied: The sandbox is gone.
        """
        with watch.phase("verbatim"):
            sandbox, surroundings = self._judged()
            # With the programs that the verifiers were last judged by: those of the base system, if the agent changed any.
            opinion = run_verbatim(
                sandbox, self.task, self.verifier_ids, retries=self._verify_retries, restored=bool(fast.masked), **surroundings
            )
        settled = settle(fast, opinion)
        if (
            settled.agrees is False and self._declared is None and self.changed(watch)
        ):  # something wrote in between: compare with what the script saw
            again = self.verify(watch, fast)
            if again.infra_error is None:
                settled = settle(again, opinion)
        return settled

    def changed(self, watch: Stopwatch) -> bool:
        """Whether anything changed since the verifiers last ran: the filesystem, or what the agent's servers may answer.

        Args:
            watch: Counts the seconds.
        """
        if self._declared is not None:
            return self._copy is None
        with watch.phase("fingerprint"):
            return self._is_live or self.sandbox.generation() != self._verified_generation

    def tampered(self, watch: Stopwatch) -> tuple[str, ...]:
        """System files that differ from what the build left, sorted; empty where the sandbox cannot tell.

        Args:
            watch: Counts the seconds.
        """
        with watch.phase("fingerprint"):
            now = self._system_changes()
        return tuple(sorted(path for path in {*now, *self._built_system} if now.get(path) != self._built_system.get(path)))

    @property
    def incidents(self) -> tuple[str, ...]:
        """What befell the connection to the sandbox, and what could not be fetched from it."""
        return (*(self.sandbox.incidents if isinstance(self.sandbox, ReportsIncidents) else ()), *self._problems)

    def _shell_env(self) -> dict[str, str]:
        """The image's variables under those of the task, as a container's win over its image's; both over the shell's defaults."""
        return {**self._shell_config.env, **self._built.env, **literal_env(self.task.config.environment.env)}

    def _system_changes(self) -> dict[str, str]:
        return self.sandbox.system_changes() if isinstance(self.sandbox, SeesSystemChanges) else {}

    def close(self) -> None:
        """End the shell and remove the sandbox. Idempotent."""
        session, self._session = self._session, None
        # First, so that whoever waits in another thread for a command or for the verifiers wakes up: a session is closed after its step.
        self.sandbox.close()
        if session is not None:
            session.close()
            if self._copy is not None:
                self._copy.close()
