"""What a shell session is told and what it answers: plain frozen records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import get_args

from t1_env.errors import ConfigError
from t1_env.protocol import ShellState
from t1_env.shell.dialect import ShellName

DEFAULT_ENV: Mapping[str, str] = MappingProxyType(
    {
        "TERM": "xterm-256color",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "MANPAGER": "cat",
        "SYSTEMD_PAGER": "cat",
        "DEBIAN_FRONTEND": "noninteractive",
    }
)
"""Variables of the agent's shell on top of the sandbox's: a real terminal, and no pager in the way unless one is asked for."""

TIMEOUT_EXIT_CODE = 124
"""Exit code of a command that ran out of time, whatever it returned after being interrupted (as ``timeout(1)`` does)."""


@dataclass(frozen=True, slots=True)
class ShellConfig:
    """How a session behaves.

    Args:
        shell: ``"bash"``, or in plain mode (no job control is promised) ``"sh"`` and ``"zsh"``.
        rows: Height of the terminal in lines.
        cols: Width of the terminal in columns.
        timeout_s: Default wall-clock limit of one command.
        quiet_timeout_s: A command that prints nothing for this long is ended like one that ran out of time; None switches it off.
        max_output_bytes: Limit on ``ShellResult.output``, in UTF-8 bytes, without the marker line that states what was left out.
        wait_settle_s: How long the foreground program must stay blocked on the terminal before the step counts as waiting for input.
        interrupt_grace_s: Time a command gets to react to SIGINT before SIGQUIT.
        quit_grace_s: Time it gets to react to SIGQUIT before SIGKILL.
        kill_grace_s: Time the shell gets to come back after its foreground was killed before it is replaced.
        start_timeout_s: Limit on starting (or replacing) the shell.
        log_bytes: How much of everything the terminal prints ``Session.log`` keeps: the last so many bytes, in a temporary file that grows
            as it is needed. 0 keeps nothing.
        keep_ansi: Leave escape sequences and control characters in ``ShellResult.output``; only line ends are normalised.
        env: Variables of the shell on top of the sandbox's.
        cwd: Directory the shell starts in; None for the sandbox's working directory.

    Raises:
        ConfigError: If a value cannot be used.
    """

    shell: ShellName = "bash"
    rows: int = 24
    cols: int = 80
    timeout_s: float = 30.0
    quiet_timeout_s: float | None = None
    max_output_bytes: int = 16 * 1024
    wait_settle_s: float = 0.15
    interrupt_grace_s: float = 1.0
    quit_grace_s: float = 0.5
    kill_grace_s: float = 1.0
    start_timeout_s: float = 20.0
    log_bytes: int = 256 << 20
    keep_ansi: bool = False
    env: Mapping[str, str] = field(default_factory=lambda: DEFAULT_ENV)
    cwd: str | None = None

    def __post_init__(self) -> None:
        if self.shell not in get_args(ShellName):
            raise ConfigError(f"ShellConfig.shell must be one of {', '.join(get_args(ShellName))}, got {self.shell!r}")
        for name in ("rows", "cols"):
            value = getattr(self, name)
            if not 1 <= value <= 1000:
                raise ConfigError(f"ShellConfig.{name} must be between 1 and 1000, got {value!r}")
        if self.max_output_bytes < 64:
            raise ConfigError(f"ShellConfig.max_output_bytes must be at least 64, got {self.max_output_bytes!r}")
        if self.log_bytes < 0:
            raise ConfigError(f"ShellConfig.log_bytes must be a number of bytes >= 0, got {self.log_bytes!r}")
        for name in ("timeout_s", "start_timeout_s", "wait_settle_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"ShellConfig.{name} must be a positive number of seconds, got {value!r}")
        for name in ("interrupt_grace_s", "quit_grace_s", "kill_grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"ShellConfig.{name} must be a number of seconds >= 0, got {value!r}")
        if self.quiet_timeout_s is not None and not self.quiet_timeout_s > 0:
            raise ConfigError(f"ShellConfig.quiet_timeout_s must be a positive number of seconds or None, got {self.quiet_timeout_s!r}")


@dataclass(frozen=True, slots=True)
class ShellResult:
    """What one ``Session.run`` or ``Session.keys`` brought.

    Args:
        output: New output only, decoded as UTF-8 with replacement. Long output keeps head and tail around a line that states how many
            bytes were left out.
        output_bytes: Size of the whole output in UTF-8 bytes, before anything was left out.
        elided_bytes: How many of them are missing from ``output``.
        exit_code: Exit status of the command (or of a shell that ended); None while something still runs or the status is unknown.
        state: What the terminal is doing now.
        cwd: Working directory of the shell after its last finished command.
        timed_out: Whether the command was ended because it ran out of time.
        seconds: Wall time of the step.
        log_start: Where the terminal bytes of this step begin in ``Session.log``.
        log_end: Where they end.
    """

    output: str
    output_bytes: int
    elided_bytes: int
    exit_code: int | None
    state: ShellState
    cwd: str
    timed_out: bool
    seconds: float
    log_start: int = 0
    log_end: int = 0
