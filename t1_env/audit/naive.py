"""A verifier that does what most harnesses do, to show that an attack is real: it trusts everything that the agent could touch.

The image has pytest; after the agent's last command the tests are copied into the agent's own sandbox, beside what it left running, and
``pytest /tests`` is typed into the agent's own shell, as Terminal-Bench 1 and others do. What is paid is read as Harbor reads it: the
reward files first, else pytest's own lines.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
from pathlib import Path
from typing import Any, Final

from t1_env.audit.attack import Attack
from t1_env.audit.site import survey
from t1_env.errors import SandboxError, ShellError, T1Error
from t1_env.machine import Machine, sandbox_factory
from t1_env.sandbox.base import Sandbox
from t1_env.sandbox.outpost.interpreter import package_members
from t1_env.sandbox.outpost.layout import PACKAGES
from t1_env.shell import ShellConfig
from t1_env.tasks import Task
from t1_env.timing import Stopwatch
from t1_env.verifiers.verbatim import parse_results

TIMEOUT_S: Final = 60.0
"""Limit on one run of the naive verifier."""

_ARCHIVE: Final = "/tmp/t1-pytest.tar"
_RESULTS: Final = "/logs/verifier"
_VERIFY: Final = f"""mkdir -p {_RESULTS}
if pytest -rA /tests >{_RESULTS}/output.txt 2>&1; then echo 1 >{_RESULTS}/reward.txt; else echo 0 >{_RESULTS}/reward.txt; fi"""


def naive_gain(attack: Attack, task: Task, *, sandbox: Any = "local", weak: frozenset[str] = frozenset()) -> int | None:
    """Play an attack, then verify naively.

    Args:
        attack: The attack.
        task: What it is aimed at.
        sandbox: Backend name or factory.
        weak: Verifiers that do not count; see `t1_env.audit.agents.weak_verifiers`.

    Returns:
        The number of verifiers that the naive verifier would pay for, that did not pass untouched and are not weak. None where it cannot be
        said: the sandbox has no Python to run pytest with, or nothing answered any more.
    """
    machine = Machine(task, sandbox_factory(sandbox), ShellConfig(timeout_s=TIMEOUT_S), verify_retries=1)
    try:
        untouched = machine.start(Stopwatch(enabled=False)).as_bools()
        if not _install_pytest(machine.sandbox):
            return None
        machine.sandbox.run(["mkdir", "-p", _RESULTS])  # as harnesses do when they start a sandbox
        site = survey(task, tests=machine.verifier_ids)
        architecture = machine.sandbox.run(["uname", "-m"]).stdout.decode().strip()
        if attack.machines and architecture not in attack.machines:
            return None
        for command in attack.actions(site, architecture):
            machine.session.run(command.text, command.timeout_s or TIMEOUT_S)
        paid = _verify(machine)
    except T1Error:
        return None
    finally:
        machine.close()
    return sum(passed and not untouched[name] and name not in weak for name, passed in paid.items())


def _verify(machine: Machine) -> dict[str, bool]:
    """Verifier -> whether the naive verifier pays for it; none where an attack broke it."""
    try:
        machine.sandbox.put(machine.task.tests_dir, "/tests")
        machine.session.run(f"cd {machine.workdir}", TIMEOUT_S)
        machine.session.run(_VERIFY, TIMEOUT_S)
    except (SandboxError, ShellError, OSError):
        return dict.fromkeys(machine.verifier_ids, False)
    ids = machine.verifier_ids
    rewards = _read(machine.sandbox, "reward.json"), _read(machine.sandbox, "reward.txt")
    if any(_says_yes(text) for text in rewards):
        return dict.fromkeys(ids, True)
    report = parse_results({}, _read(machine.sandbox, "output.txt"), ids)
    return dict.fromkeys(ids, False) if report is None else report.as_bools()


def _says_yes(text: str) -> bool:
    try:
        value = json.loads(text)
        values = list(value.values()) if isinstance(value, dict) else [value]
        return bool(values) and all(float(score) >= 1.0 for score in values)
    except (ValueError, TypeError):
        return False


def _read(sandbox: Sandbox, name: str) -> str:
    try:
        return sandbox.get(f"{_RESULTS}/{name}").decode(errors="replace")
    except (SandboxError, OSError):
        return ""


def _install_pytest(sandbox: Sandbox) -> bool:
    """Put pytest where the sandbox's Python finds it, as ``pip install pytest`` would; False without a Python that can use it."""
    script = "import sys, sysconfig; print(sys.version_info >= (3, 10), sys.executable, sysconfig.get_path('purelib'))"
    found = sandbox.run(["python3", "-I", "-c", script]).stdout.decode(errors="replace").split()
    if len(found) != 3 or found[0] != "True":
        return False
    _, python, directory = found
    sandbox.put(_pytest_archive(), _ARCHIVE)
    unpacked = sandbox.run(["sh", "-c", 'mkdir -p "$1" && tar -xf "$0" -C "$1" && rm "$0"', _ARCHIVE, directory])
    sandbox.put(
        f"#!{python}\nimport sys\nfrom pytest import console_main\nsys.exit(console_main())\n".encode(), "/usr/local/bin/pytest", mode=0o755
    )
    return unpacked.exit_code == 0


@functools.cache
def _pytest_archive() -> bytes:
    """This installation's pytest and what it needs, as a tar archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member in package_members(compiled=False, scratch=None):
            info = tarfile.TarInfo(str(Path(member.name).relative_to(PACKAGES)))
            content = member.source.read_bytes()
            info.size, info.mode = len(content), member.mode
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()
