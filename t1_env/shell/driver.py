"""One running shell: start a command, wait for what comes of it, end it when it must end.

Completion is told by the status channel alone. Two other signals come from the kernel: the foreground of the terminal (is somebody blocked
reading it?) and the end of the shell's process. Nothing is ever concluded from printed text, with one harmless exception: the invisible
mark in the default prompt, which prompts us to type the line that takes bash back into its loop.
"""

from __future__ import annotations

import enum
import signal
import time
from typing import Final

from t1_env.shell import foreground
from t1_env.shell.blocked import has_descriptor, program_name
from t1_env.shell.channel import ShellChannel
from t1_env.shell.config import ShellConfig
from t1_env.shell.dialect import PROMPT_MARK, Channel
from t1_env.shell.log import OutputLog
from t1_env.shell.output import HeadTail, TextFilter
from t1_env.shell.records import ChannelBroken, LoopLeft, RecordReader, ShellLeft, StatusRecord
from t1_env.shell.screen import TerminalScreen

_FIRST_PROBE_S: Final = 0.02
_MAX_PROBE_S: Final = 0.2
_DRAIN_BYTES: Final = 1 << 19
"""More than a pty can hold: after the status record, reading this much is certain to have read all that was printed before it, and a
background job that prints without end cannot keep the step open."""
_MAX_RECOVERIES: Final = 3
_KILL_ROUND_S: Final = 0.1
_STUCK_S: Final = 1.0
_PROMPT_POLL_S: Final = 0.002


class Outcome(enum.Enum):
    """Why waiting ended."""

    FINISHED = enum.auto()
    """The status record of the command arrived."""
    WAITING = enum.auto()
    """The foreground is blocked reading the terminal."""
    EXPIRED = enum.auto()
    """The time was up."""
    QUIET = enum.auto()
    """Nothing was printed for too long."""
    ENDED = enum.auto()
    """The shell's process is gone."""
    LOST = enum.auto()
    """bash sits at its prompt and does not come back into the loop."""


class _InputWatch:
    """When to look at the foreground, and for how long it has been found blocked.

    The first look comes late enough that builtins and quick programs never pay for it; after that less and less often.
    """

    def __init__(self, now: float, settle_s: float) -> None:
        self.due = now + _FIRST_PROBE_S
        self._step_s = _FIRST_PROBE_S
        self._settle_s = settle_s
        self._blocked_since: float | None = None

    def settled(self, now: float, blocked: bool) -> bool:
        """Note what was seen; whether it has been blocked long enough to call it waiting."""
        if not blocked:
            self._blocked_since = None
            self._step_s = min(1.5 * self._step_s, _MAX_PROBE_S)
            self.due = now + self._step_s
            return False
        if self._blocked_since is None:
            self._blocked_since = now
        settled_at = self._blocked_since + self._settle_s
        self.due = max(settled_at, now + _FIRST_PROBE_S)
        return now >= settled_at


class ShellDriver:
    """Drives one bash over its channel.

    Args:
        channel: The running bash.
        config: The session's configuration.
        text: Where visible output goes.
        kept: Where the kept part of it is collected.
        screen: The picture of the terminal.
        log: Everything it prints.
    """

    def __init__(
        self, channel: ShellChannel, config: ShellConfig, text: TextFilter, kept: HeadTail, screen: TerminalScreen, log: OutputLog
    ) -> None:
        self.channel = channel
        self._config = config
        self._text = text
        self._kept = kept
        self._screen = screen
        self._log = log
        self._reader = RecordReader()
        self._sequence = 0
        self._spare: frozenset[int] = frozenset()
        self._last_output = 0.0
        self._tail = b""
        self._recoveries = 0
        self.record: StatusRecord | None = None
        self.left_cwd: str | None = None
        """Working directory of a shell that ended, if it could still tell."""
        self.broken = False
        """Whether bash cannot read commands any more, because the agent closed a descriptor of ours."""
        self._payload = b""
        self._answers = 0  # since the channel broke, or was renewed
        self._cpu_ticks: int | None = None
        self.busy = True  # until the start-up file has run

    # --------------------------------------------------------------------------------------------------------------------- commands
    def begin(self, text: str) -> None:
        """Start a command. What background jobs printed since the last one becomes part of its output."""
        self.channel.discard_input()
        self.channel.restore_termios()
        self.drain()
        self._spare = foreground.shell_children(self.channel.process.pid)
        self._sequence += 1
        self._recoveries = 0
        self.busy = True
        self._payload = self.channel.dialect.encode(self._sequence, text, self.record)
        self.channel.send(self._payload)

    def type_keys(self, data: bytes, deadline: float) -> None:
        """Type into the terminal, reading what it prints meanwhile; what it does not take by the deadline is dropped."""
        while data:
            written = self.channel.write_keys(data)
            data = data[written:]
            if data:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self.channel.wait(left, writable=True).output:
                    self._read_block()

    def catch_up(self) -> bool:
        """Take what arrived while nobody waited. Returns whether the shell is still there."""
        self._take_records()
        return not self.channel.ended

    # ---------------------------------------------------------------------------------------------------------------------- waiting
    def wait(self, deadline: float, *, for_input: bool = True, quiet_s: float | None = None) -> Outcome:
        """Wait for the command in flight.

        Args:
            deadline: ``time.monotonic()`` at which to stop.
            for_input: Whether a foreground that is blocked on the terminal ends the wait.
            quiet_s: Stop when nothing was printed for so long.

        Returns:
            Why it ended. Output read on the way is in the text filter.
        """
        now = self._last_output = time.monotonic()
        watch = _InputWatch(now, self._config.wait_settle_s)
        while True:
            limit = deadline if quiet_s is None else min(deadline, self._last_output + quiet_s)
            events = self.channel.wait(min(limit, watch.due) - now)
            if events.status and self._take_records():
                self.drain()
                return Outcome.FINISHED
            if events.output:
                self._read_block()
            elif events.ended or self.channel.hung_up:
                if self._has_ended():
                    return Outcome.ENDED
                # a program that replaced the shell and let go of the terminal: only its end can be waited for
                time.sleep(min(_FIRST_PROBE_S, max(0.0, limit - now)))
            if self.broken:
                return Outcome.LOST
            now = time.monotonic()
            if now >= watch.due:
                blocked = self._is_blocked()
                if blocked is None:
                    return Outcome.LOST
                if watch.settled(now, blocked) and for_input:
                    self.drain()
                    return Outcome.WAITING
            if now >= limit:
                self.drain()
                if self._take_records():  # it finished while we looked at the clock
                    self.drain()
                    return Outcome.FINISHED
                return Outcome.EXPIRED if now >= deadline else Outcome.QUIET

    def _has_ended(self) -> bool:
        if self.channel.exit_code(0) is None and self.channel.exit_code(0.05) is None:
            return False
        self.drain()
        return True

    def _is_blocked(self) -> bool | None:
        """Whether the foreground waits for input; None when bash is at its prompt and cannot be brought back."""
        seen = foreground.probe(self.channel.master_fd, self.channel.process.pid)
        if seen is None:
            return False
        if seen.blocked_on_read:
            if seen.is_shell and self._is_at_prompt():
                return None if not self._reenter() else False
            return True
        if seen.is_shell or self.channel.is_cooked():
            return False
        # no lines are collected, or nothing typed is shown: an editor, a pager, a password
        quiet_s = time.monotonic() - self._last_output
        if seen.blocked_on_wait and not self.channel.is_canonical():
            return quiet_s >= self._config.wait_settle_s / 2
        idle = seen.cpu_ticks is not None and seen.cpu_ticks == self._cpu_ticks
        self._cpu_ticks = seen.cpu_ticks
        return idle and quiet_s >= self._config.wait_settle_s

    def foreground_program(self) -> str:
        """Name of the program in the foreground; empty for the shell itself, and where it is unknown."""
        group = foreground.foreground_group(self.channel.master_fd)
        return program_name(group) if group not in (0, self.channel.process.pid) else ""

    def _is_at_prompt(self) -> bool:
        prompt_fd = self.channel.dialect.prompt_fd
        if prompt_fd is not None:
            return has_descriptor(self.channel.process.pid, prompt_fd)
        return self._tail.endswith(PROMPT_MARK)

    def _reenter(self, line: bytes | None = None) -> bool:
        """Type the line that takes the shell, fallen out of its loop to the prompt, back in."""
        self._recoveries += 1
        if self._recoveries > _MAX_RECOVERIES or not self.channel.status_open:
            return False
        self._tail = b""
        self.channel.restore_termios(echo=False)
        self.channel.discard_input()
        self.channel.write_keys(self.channel.dialect.return_line if line is None else line)
        return True

    # ---------------------------------------------------------------------------------------------------------------------- reading
    def drain(self) -> None:
        """Read everything the terminal holds."""
        left = _DRAIN_BYTES
        while left > 0 and (size := self._read_block()):
            left -= size

    def _read_block(self) -> int:
        data = self.channel.read_output()
        if data:
            self._last_output = time.monotonic()
            self._tail = data[-64:] if len(data) >= 64 else (self._tail + data)[-64:]
            self._log.append(data)
            self._screen.feed(data)
            visible = self._text.feed(data)
            if visible:
                self._kept.append(visible)
        return len(data)

    def _take_records(self) -> bool:
        """Read the status channel; whether the record of the current command is there."""
        while data := self.channel.read_status():
            for record in self._reader.feed(data):
                if isinstance(record, ChannelBroken):
                    self.broken = True
                    self._answers = 0
                elif isinstance(record, LoopLeft):
                    if not self.broken:
                        self._reenter()
                elif isinstance(record, ShellLeft):
                    self.left_cwd = record.cwd
                else:
                    self._note_status(record)
        return not self.busy

    def _note_status(self, record: StatusRecord) -> None:
        self._answers += 1
        if record.sequence == self._sequence:
            if self.busy:  # else one for a wake-up too many
                self.record = record
                self.busy = False
                if record.exports is not None:
                    self.channel.note_exports(record.exports)
        elif self.busy and self.channel.dialect.rereads_text:
            self.channel.wake()  # it may have been interrupted between the wake-up and the command: which is never run twice

    # -------------------------------------------------------------------------------------------------------------------- recovery
    def await_prompt(self, timeout_s: float) -> None:
        """Wait until a bash that cannot read its commands has left its loop and sits at its prompt.

        Only there it has no descriptors open for a moment. A loop that was typed at the prompt is followed by one more, as the prompt
        command: that reports and waits, and has to fail at a command of its own.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_back_at_prompt() and not self.channel.hung_up and time.monotonic() < deadline:
            if self.channel.wait(_PROMPT_POLL_S).output:
                self._read_block()
            self._take_records()
            if self.broken and self._answers:
                self._answers = 0
                self.channel.wake()

    def reconnect(self, line: bytes, ours: dict[Channel, int], timeout_s: float) -> bool:
        """Bring bash back after it closed its side of the channels; a command it did not take is sent again.

        Args:
            line: What makes it open the new ones.
            ours: Our side of them.
            timeout_s: How long it may take to answer over them.

        Returns:
            Whether it is back.
        """
        self.channel.replace(ours)
        self._reader = RecordReader()
        self._recoveries, self.broken = 0, False
        self._reenter(line)
        self._answers = 0
        deadline = stuck_at = time.monotonic() + timeout_s
        while not self._answers:
            now = time.monotonic()
            # what was typed arrives a moment after it was written, so it may have to sit there for a while before it is given up
            stuck_at = min(stuck_at, now + _STUCK_S) if self._is_back_at_prompt() else deadline
            if now >= stuck_at or self.channel.hung_up:
                return False
            events = self.channel.wait(min(stuck_at - now, _FIRST_PROBE_S))
            if events.output:
                self._read_block()
            self._take_records()
        self.channel.retire()
        if self.busy:
            self.channel.send(self._payload)
        else:
            self.drain()
        return True

    def _is_back_at_prompt(self) -> bool:
        if not self._is_at_prompt():  # by the mark, which is forgotten when something is typed
            return False
        seen = foreground.probe(self.channel.master_fd, self.channel.process.pid)
        return seen is not None and seen.is_shell and seen.blocked_on_read

    def interrupt(self) -> Outcome:
        r"""End the command in flight: ^C, ^\, then SIGKILL for what runs in the foreground. The shell itself is spared.

        Returns:
            ``FINISHED`` or ``ENDED``; ``EXPIRED`` or ``LOST`` if the shell did not come back and has to be replaced.
        """
        job = foreground.ForegroundJob(self.channel.master_fd, self.channel.process.pid, self._spare)
        try:
            self.channel.discard_input()  # what was typed into it is not for the next command
            outcome = self._end_job(job)
            job.kill()  # members that let go of the terminal and lived on
            job.await_end(_KILL_ROUND_S)
            self.drain()
        finally:
            job.close()
        return outcome

    def _end_job(self, job: foreground.ForegroundJob) -> Outcome:
        config = self._config
        for number, grace_s in ((signal.SIGINT, config.interrupt_grace_s), (signal.SIGQUIT, config.quit_grace_s)):
            if number == signal.SIGQUIT and foreground.foreground_group(self.channel.master_fd) == self.channel.process.pid:
                continue  # an interactive bash ignores it
            self.channel.signal_foreground(number)
            outcome = self._wait_or_reenter(grace_s)
            if outcome in (Outcome.FINISHED, Outcome.ENDED):
                return outcome
        end = time.monotonic() + config.kill_grace_s
        while True:
            job.refresh()
            job.kill()
            outcome = self._wait_or_reenter(_KILL_ROUND_S)
            if outcome in (Outcome.FINISHED, Outcome.ENDED) or time.monotonic() >= end:
                return outcome
            self.channel.signal_foreground(signal.SIGINT)  # the shell may go on with the rest of its list

    def _wait_or_reenter(self, grace_s: float) -> Outcome:
        """Wait for the status; if bash itself turns out to read the terminal it is at a prompt of the agent's own making."""
        deadline = time.monotonic() + grace_s
        outcome = self.wait(min(deadline, time.monotonic() + _KILL_ROUND_S), for_input=False)
        if outcome is not Outcome.EXPIRED:
            return outcome
        seen = foreground.probe(self.channel.master_fd, self.channel.process.pid)
        if seen is not None and seen.is_shell and seen.blocked_on_read:
            self._reenter()
        return self.wait(deadline, for_input=False)
