"""What a server is like and what lies there: its system, its Python, T1's runtimes, and what sandboxes left whose owner is gone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from t1_env.errors import SandboxUnavailable
from t1_env.sandbox import owner
from t1_env.sandbox.outpost.server import LABEL
from t1_env.sandbox.reaper import Finding
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.far import FarShell, quote

EPISODES: Final = "episodes"
RUNTIMES: Final = "runtimes"
ALIVE: Final = (
    'alive() { read -r label 2> /dev/null < "$1" || return 1; rest=${label#*:}; pid=${rest%%:*}; '
    'read -r boot < /proc/sys/kernel/random/boot_id && [ "${label%%.*}" = "$boot" ] && [ -d "/proc/$pid" ] '
    '&& read -r stat 2> /dev/null < "/proc/$pid/stat" && set -- ${stat##*) } && [ "${20}" = "${rest#*:}" ] && [ "$1" != Z ]; }'
)
"""Shell function: whether the outpost whose label a file holds still runs; sets ``pid``."""

_CANDIDATES: Final = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "/usr/bin/python3", "/usr/local/bin/python3")
# What outposts and verifiers import; distributions split the standard library, and the smallest part of it is not enough.
_CHECK: Final = (
    "import sys, ctypes, difflib, fcntl, hashlib, json, pdb, select, subprocess, tempfile, termios, unittest, zlib; "
    "sys.version_info >= (3, 11) and print(sys.executable)"
)
_GONE: Final = "its owner or its outpost is gone"
_SEEN_INSIDE: Final = ("/usr/", "/opt/", "/etc/", "/bin/", "/sbin/", "/lib")
REMOVAL_LIMIT_S: Final = 300.0
_ABANDONED_S: Final = 900
"""A directory without a living outpost is left alone for this long, unless its owner is dead: the outpost may be about to start."""

_pythons: Final[dict[SshConfig, str]] = {}
"""The Python that was found on each server: finding it is half the time of a survey."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The directory of one sandbox.

    Args:
        name: Its name: the owner's label and some random characters.
        alive: Whether its outpost runs.
        age_s: Seconds since something changed in it.
    """

    name: str
    alive: bool
    age_s: int

    @property
    def owner(self) -> str | None:
        """Label of the process that made it, perhaps on another machine; None if the name holds none."""
        return owner.from_file_name(self.name.rpartition("-")[0])


@dataclass(frozen=True, slots=True)
class Survey:
    """What a server is like.

    Args:
        machine: ``uname -m``.
        directory: Absolute path of ``SshConfig.remote_dir``.
        python: Absolute path of a Python that can run an outpost; empty without one.
        runtimes: Names of the runtimes that lie there.
        episodes: Directories of sandboxes.
    """

    machine: str
    directory: str
    python: str
    runtimes: frozenset[str]
    episodes: tuple[Episode, ...]


def survey(shell: FarShell, config: SshConfig, *, python: bool = True) -> Survey:
    """Look around.

    Args:
        shell: On the server.
        config: Of the server.
        python: Whether to look for a Python; takes the longest of all.

    Raises:
        SandboxUnavailable: It is no Linux, or the remote directory cannot be used.
    """
    rest = config.remote_dir.removeprefix("~")
    directory = f'"$HOME"{quote([rest]) if rest else ""}' if config.remote_dir.startswith("~") else quote([config.remote_dir])
    wanted = () if not python or config.runtime == "complete" else (config.python,) if config.python else _CANDIDATES
    known = _pythons.get(config) if wanted else None
    lines = (
        f"umask 077; {ALIVE}; echo system=$(uname -s); echo machine=$(uname -m); directory={directory}",
        f'problem=$(mkdir -p "$directory/{EPISODES}" "$directory/{RUNTIMES}" 2>&1); echo "problem=$problem"',
        f'cd "$directory" 2> /dev/null && echo "directory=$(pwd -P)" && [ -O . ] && [ -w {EPISODES} ] && echo usable=1',
        f'python={quote([known or ""])}; [ -x "$python" ] && echo "python=$python"',
        f"for python in {quote(() if known else wanted)}",
        f'do found=$("$python" -I -S -c {quote([_CHECK])} 2> /dev/null < /dev/null)',
        '[ -n "$found" ] && echo "python=$found" && break; done',
        f'for entry in {RUNTIMES}/*; do [ -f "$entry/boot.py" ] && echo "runtime:${{entry#*/}}=1"; done',
        f'now=$(date +%s); for entry in {EPISODES}/*; do [ -d "$entry" ] || continue',
        # A sandbox that is being closed takes its directory away under our eyes.
        f'if alive "$entry/{LABEL}"; then state=alive; else seen=$(stat -c %Y "$entry" 2>&-) || continue; state=$((now - seen)); fi',
        'echo "episode:${entry#*/}=$state"; done; cd /',
    )
    said = shell.ask("; ".join(lines))
    if known and not said.get("python"):  # it was there before, for another sandbox
        _pythons.pop(config, None)
        return survey(shell, config)
    if said.get("python"):
        _pythons[config] = said["python"]
    if said.get("system") != "Linux":
        raise SandboxUnavailable(f"an SSH sandbox needs Linux at the far side; {config.host} says it is {said.get('system')!r}")
    if said.get("usable") != "1":
        problem = said.get("problem") or "it belongs to somebody else or cannot be written"
        raise SandboxUnavailable(f"remote_dir={config.remote_dir!r} of {config.host} cannot be used: {problem}")
    if config.isolation != "none" and f"{said['directory']}/".startswith(_SEEN_INSIDE):
        raise SandboxUnavailable(
            f"remote_dir={config.remote_dir!r} of {config.host} is {said['directory']}, in a system directory. Sandboxes see those, so "
            "tests that are kept there would be no secret; choose a directory below the login's home"
        )
    return Survey(
        machine=said.get("machine", ""),
        directory=said["directory"],
        python=said.get("python", ""),
        runtimes=frozenset(_named(said, "runtime")),
        episodes=tuple(_episode(name, state) for name, state in _named(said, "episode").items()),
    )


def _named(said: Mapping[str, str], kind: str) -> dict[str, str]:
    return {name.partition(":")[2]: value for name, value in said.items() if name.startswith(f"{kind}:")}


def _episode(name: str, state: str) -> Episode:
    return Episode(name, state == "alive", int(state) if state.lstrip("-").isdigit() else 0)


def reason_to_stay(episode: Episode, in_use: Collection[str] = ()) -> str | None:
    """Why an episode's directory must stay; None if it is to be removed.

    This process knows which of its own it uses (``in_use``: their names): any other is what a start that failed, or a connection that was
    given up, left behind. An owner that is seen to be dead leaves nothing to wait for either. For others, also on machines that cannot be
    seen from here, the outpost tells: it ends by itself when its lease runs out, and no other will ever take its place, so where one is
    gone nobody's work is lost.
    """
    if episode.owner is None:
        return "its name holds no owner"
    if episode.owner == owner.owner_id():
        return "this process uses it" if episode.name in in_use else None
    if owner.is_alive(episode.owner) is False:
        return None
    if episode.alive:
        return "its outpost is running"
    return None if episode.age_s > _ABANDONED_S else "its outpost may still be starting"


def settle(shell: FarShell, found: Survey, *, in_use: Collection[str] = (), dry_run: bool = False) -> list[Finding]:
    """Remove what sandboxes left whose owner is gone or that ended without cleaning up, and nothing else.

    Args:
        shell: On the server.
        found: What lies there.
        in_use: Names of the directories that sandboxes of this process use.
        dry_run: Only say what would be removed.

    Returns:
        What was found.
    """
    findings = []
    for episode in found.episodes:
        path = f"{found.directory}/{EPISODES}/{episode.name}"
        keep = reason_to_stay(episode, in_use)
        if keep is not None:
            findings.append(Finding("remote directory", path, "kept", keep))
        elif dry_run:
            findings.append(Finding("remote directory", path, "would be removed", _GONE))
        else:
            gone = shell.ask(_removal(path), limit_s=REMOVAL_LIMIT_S).get("gone") == "1"
            reason = _GONE if gone else f"{_GONE}, but it could not be removed"
            findings.append(Finding("remote directory", path, "removed" if gone else "failed", reason))
    return findings


def _removal(path: str) -> str:
    """Shell that ends an outpost, gently first so that it cleans up after itself, and removes its directory."""
    place, label = quote([path]), quote([f"{path}/{LABEL}"])
    return (
        f"if alive {label}; then kill -TERM $pid; for i in 1 2 3 4 5 6 7 8 9 10; do alive {label} || break; sleep 0.2 || sleep 1; done; "
        f"alive {label} && kill -KILL $pid; fi; rm -rf {place} 2> /dev/null || {{ chmod -R u+rwX {place}; rm -rf {place}; }} 2> /dev/null; "
        f"[ -e {place} ] || echo gone=1"
    )
