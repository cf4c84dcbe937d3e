"""What differs between shells: how one is started, how a command reaches it, how it is brought back to its loop."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from t1_env.shell.records import StatusRecord

ShellName: TypeAlias = Literal["bash", "sh", "zsh"]


class Channel(Enum):
    """The descriptors beside the terminal."""

    WAKE = "wake"
    """Pipe to the shell: wakes the loop up."""
    TEXT = "text"
    """Memory file with the next command."""
    STATUS = "status"
    """Pipe from the shell: the records."""
    EXPORTS = "exports"
    """Memory file with the exported variables, read only when a shell has to be replaced."""
    NULL = "null"
    """The null device: where the loop's own messages and traces go."""


class Dialect(Protocol):
    """One kind of shell."""

    @property
    def name(self) -> ShellName:
        """The program."""

    @property
    def passed(self) -> Mapping[Channel, int]:
        """The descriptors it needs, and the numbers under which they reach it."""

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that make it read its start-up file."""

    @property
    def argv(self) -> list[str]:
        """The command line that starts it."""

    @property
    def start_line(self) -> bytes:
        """What has to be typed for it to read its start-up file; empty if it does so by itself."""

    @property
    def return_line(self) -> bytes:
        """What has to be typed at its prompt to bring it back into the loop."""

    @property
    def wake_byte(self) -> bytes:
        """What wakes the loop up."""

    @property
    def rereads_text(self) -> bool:
        """Whether it opens the text anew for each command, so that each begins at the start of the file."""

    @property
    def prompt_fd(self) -> int | None:
        """A descriptor that is closed while a command runs: open in a shell that reads the terminal, it says that this is the prompt."""

    def startup_file(self) -> bytes:
        """The text of the start-up file: it waits on the text channel when the shell starts."""

    def encode(self, sequence: int, text: str, before: StatusRecord | None) -> bytes:
        """The bytes for the text channel.

        Args:
            sequence: Number of this command.
            text: The agent's command. NUL bytes cannot be part of one and are dropped.
            before: The record of the previous command: what it left (``$?``, options, traps) is put back first.
        """


PROMPT_MARK = b"\x1b]7771;t1\x07"
"""The default prompt, invisible. Seen at the end of the output it means that the shell fell out of the loop; a hint, never the signal."""


def command_bytes(text: str) -> bytes:
    """A command as a shell can read it: it may carry arbitrary bytes, e.g. a file name that is not UTF-8, but no NUL."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        data = text.encode("utf-8", "replace")
    return data.replace(b"\0", b"")


def dialect_for(name: ShellName) -> Dialect:
    """The dialect of a shell by its name."""
    if name == "bash":
        from t1_env.shell.bash import BashDialect

        return BashDialect()
    from t1_env.shell.plain import PosixDialect, ZshDialect

    return ZshDialect() if name == "zsh" else PosixDialect()
