"""``task.toml`` as Harbor 1.x defines it, plus our own table ``[metadata.t1]``.

Every field and default of the format is modelled. Keys that it does not know only warn, so that tasks of newer format versions still
load; a value of the wrong type is a :class:`TaskError` naming file, key, value and expectation.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from t1_env.errors import TaskError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Megabytes = Annotated[int, Field(gt=0)]
NetworkMode = Literal["public", "no-network", "allowlist"]
Split = Literal["train", "dev", "test"]
VerifierClass = Literal["pure", "exec", "service"]
AbsolutePath = Annotated[str, Field(pattern=r"^/")]

_SIZE_UNITS_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}


class TaskWarning(UserWarning):
    """A task can be used, but something in it is ignored or looks wrong."""


def _parse_size_mb(value: object) -> object:
    """Turn the deprecated ``"2G"`` notation into MiB; anything else is left to the type check."""
    if not isinstance(value, str):
        return value
    digits, unit = value.strip().upper().removesuffix("B").removesuffix("I"), "M"
    if digits and digits[-1] in _SIZE_UNITS_MB:
        digits, unit = digits[:-1], digits[-1]
    try:
        return max(1, int(float(digits) * _SIZE_UNITS_MB[unit]))
    except (ValueError, OverflowError):
        raise ValueError("expected a size such as '2G' or '512M'") from None


SizeText = Annotated[Megabytes, BeforeValidator(_parse_size_mb)]


class _Table(BaseModel):
    """A table of ``task.toml``: immutable; unknown keys are kept aside and reported as warnings."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Author(_Table):
    """``[[task.authors]]``."""

    name: str
    email: str | None = None


class TaskInfo(_Table):
    """``[task]``: how the task is published."""

    name: str = Field(pattern=r"^[^/\s]+/[^/\s]+$", description="org/name")
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class Artifact(_Table):
    """``[[artifacts]]``: a file to keep after the episode."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None


class HealthCheck(_Table):
    """``[environment.healthcheck]``."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class McpServer(_Table):
    """``[[environment.mcp_servers]]``."""

    name: str
    transport: Literal["sse", "stdio", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = Field(default_factory=dict)


class Tpu(_Table):
    """``[environment.tpu]``."""

    type: str
    topology: str | None = None


class _NetworkRules(_Table):
    """The network settings shared by the environment and by the phases that override it."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_allowlist(self) -> _NetworkRules:
        if self.allowed_hosts is not None and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts is only valid with network_mode = "allowlist"')
        return self


class EnvironmentConfig(_NetworkRules):
    """``[environment]``: the machine the agent works on."""

    network_mode: NetworkMode = "public"
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HealthCheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = Field(default=None, description="deprecated: network_mode")
    memory: SizeText | None = Field(default=None, description="deprecated: memory_mb")
    storage: SizeText | None = Field(default=None, description="deprecated: storage_mb")

    @model_validator(mode="after")
    def _workdir_is_absolute(self) -> EnvironmentConfig:
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError(f"workdir must be an absolute path, got {self.workdir!r}")
        return self

    @property
    def network(self) -> bool:
        """Whether the task asks for network access (the deprecated ``allow_internet`` included)."""
        return self.network_mode != "no-network" if self.allow_internet is None else self.allow_internet

    @property
    def asks_for_network(self) -> bool:
        """Whether the task says in so many words that it needs the network; the format's default does not count, nor an allow-list."""
        if self.allow_internet is not None:
            return self.allow_internet
        return "network_mode" in self.model_fields_set and self.network_mode == "public"

    @property
    def memory_limit_mb(self) -> int | None:
        """Memory limit in MiB, from the current or the deprecated key."""
        return self.memory_mb if self.memory_mb is not None else self.memory

    @property
    def storage_limit_mb(self) -> int | None:
        """Storage limit in MiB, from the current or the deprecated key."""
        return self.storage_mb if self.storage_mb is not None else self.storage


class AgentConfig(_NetworkRules):
    """``[agent]``: the agent's phase."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class Collect(_Table):
    """``[[verifier.collect]]``: a command run in the agent's container before it is torn down."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class VerifierConfig(_NetworkRules):
    """``[verifier]``: the verifier's phase."""

    timeout_sec: Seconds = 600.0
    env: Mapping[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentConfig | None = None
    collect: tuple[Collect, ...] = ()

    @model_validator(mode="after")
    def _shared_has_no_environment(self) -> VerifierConfig:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" and [verifier.environment] exclude each other')
        return self

    @property
    def separate(self) -> bool:
        """Whether the verifiers run in an environment of their own."""
        return self.environment is not None if self.environment_mode is None else self.environment_mode == "separate"


class SolutionConfig(_Table):
    """``[solution]``."""

    env: Mapping[str, str] = Field(default_factory=dict)


class StepConfig(_Table):
    """``[[steps]]``: one stage of a multi-step task."""

    name: str
    agent: AgentConfig = Field(default_factory=AgentConfig)
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()


class T1Metadata(_Table):
    """``[metadata.t1]``: what T1 itself records about a task.

    Args:
        family: Family that generated it; None for a hand-written task.
        level: Difficulty, 1 is the easiest.
        seed: Seed of the family instance.
        split: ``train``, ``dev`` or ``test``; follows from the seed.
        category: What kind of work it is, for example ``logs``.
        requires: Programs that must be present in the sandbox.
        artifacts: Files and directories that are what the task asks for, relative to the working directory or absolute. Where a sandbox
            has no verification clones, only these are verified.
        verifier_class: What the verifiers look at: the files left behind, or how programs left behind behave.
        classes: What the verifiers need: ``"pure"`` (files only), ``"exec"`` (they start programs) or ``"service"`` (the agent's live
            processes must answer). One class for all, or verifier id -> class; what is not named is inferred from the tests.
        imports: Where modules of the agent that a test imports are loaded: ``"beside"`` the test, as pytest does, or ``"apart"`` from it,
            in a process that cannot touch it and that hands over plain data only.
        writable: Paths of the base system that the task is about: changing them, or what lies below, is not tampering.
    """

    family: str | None = None
    level: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    split: Split | None = None
    category: str | None = None
    requires: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    verifier_class: Literal["final-state", "behaviour"] = "final-state"
    classes: VerifierClass | Mapping[str, VerifierClass] = Field(default_factory=dict)
    imports: Literal["beside", "apart"] = "beside"
    writable: tuple[AbsolutePath, ...] = ()


class TaskConfig(_Table):
    """The whole of ``task.toml``."""

    schema_version: str = "1.4"
    task: TaskInfo | None = None
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    solution: SolutionConfig = Field(default_factory=SolutionConfig)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[StepConfig, ...] | None = None
    artifacts: tuple[str | Artifact, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _old_version_key(cls, data: Any) -> Any:
        """Accept ``version``, the old name of ``schema_version``."""
        if isinstance(data, dict) and "version" in data and "schema_version" not in data:
            data = dict(data)
            data["schema_version"] = data.pop("version")
        return data


def parse_task_toml(text: str, *, file: str | Path) -> tuple[TaskConfig, T1Metadata]:
    """Read the text of a ``task.toml``.

    Args:
        text: Contents of the file.
        file: Its name, for messages only.

    Returns:
        The configuration and the parsed ``[metadata.t1]`` table (all defaults when the task has none).

    Raises:
        TaskError: Not TOML, a value of the wrong type or outside its range, or a required key missing.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file}: not valid TOML: {error}") from None
    try:
        config = TaskConfig.model_validate(data)
    except ValidationError as error:
        raise TaskError(_explain(error, file=file, prefix="")) from None
    if not config.schema_version.startswith("1."):
        raise TaskError(f"{file}: schema_version = {config.schema_version!r}: expected a 1.x version ('1.0' to '1.4')")
    try:
        metadata = T1Metadata.model_validate(config.metadata.get("t1", {}))
    except ValidationError as error:
        raise TaskError(_explain(error, file=file, prefix="metadata.t1")) from None
    unknown = [*_unknown_keys(config, ""), *_unknown_keys(metadata, "metadata.t1.")]
    if unknown:
        warnings.warn(f"{file}: unknown keys are ignored: {', '.join(unknown)}", TaskWarning, stacklevel=3)
    return config, metadata


def _unknown_keys(table: BaseModel, prefix: str) -> Iterator[str]:
    """Dotted names of the keys that no field models, depth first, in file order."""
    yield from (f"{prefix}{key}" for key in table.model_extra or {})
    for name in type(table).model_fields:
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from _unknown_keys(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _unknown_keys(item, f"{prefix}{name}[{index}].")


def _explain(error: ValidationError, *, file: str | Path, prefix: str) -> str:
    """One line that names file, key, value and expectation for every problem pydantic found."""
    problems = []
    for detail in error.errors(include_url=False):
        key = prefix
        for part in detail["loc"]:
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            problems.append(f"{key or 'the file'} is missing: {message.lower()}")
        else:
            value = repr(detail["input"])
            shown = value if len(value) <= 80 else f"{value[:77]}..."
            problems.append(f"{key or 'the file'} = {shown}: {message[:1].lower()}{message[1:]}")
    return f"{file}: " + "; ".join(problems)
