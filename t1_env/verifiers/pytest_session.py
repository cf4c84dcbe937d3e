"""pytest, driven as a library: a session prepared before the fork, finished after it.

A cold ``pytest.main`` takes most of a second and a forked one still a third of it. What costs that time is done once here, in the warm
interpreter: scanning entry points (switched off for good), importing and registering the built-in plugins, parsing options, building the
fixture registry. What is left for each verification is collecting the test files and running them. Failure reports are a line of text;
pytest's rendered tracebacks cost more than the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pytest
from _pytest.config import get_config
from _pytest.main import Session

Report = Callable[[dict[str, Any]], None]
"""Where records go: ``{"kind": "collected" | "start" | "verdict", ...}``."""

MESSAGE_LIMIT: Final = 300
"""Characters kept of why a test did not pass."""

# Everything that tests cannot notice, or that writes where it must not. Kept are the plugins behind marks and fixtures.
_DISABLED_PLUGINS: Final = (
    *("terminal", "pastebin", "junitxml", "doctest", "cacheprovider", "setuponly", "setupplan", "stepwise"),
    *("faulthandler", "unraisableexception", "threadexception"),
)


def new_session() -> Session:
    """Build a configured session rooted at ``/`` that knows no test file and no conftest yet.

    Returns:
        A session for one use of `collect_tests`. Its root is ``/`` because that directory exists everywhere; ids are made relative to
        the tests directory when they are reported.
    """
    arguments = ["-c", "/dev/null", "--rootdir=/", "--import-mode=importlib", "--assert=plain", "--capture=no", "--noconftest"]
    for name in _DISABLED_PLUGINS:
        arguments += ["-p", f"no:{name}"]
    with _environment_without_pytest():
        config = get_config(arguments, [])
        config = config.pluginmanager.hook.pytest_cmdline_parse(pluginmanager=config.pluginmanager, args=arguments)
    config._do_configure()
    session = Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    return session


def collect_tests(
    session: Session, recorder: Recorder, report: Report, *, only: Sequence[str] | None = None, ignored: Sequence[str] = ()
) -> dict[str, list[pytest.Item]]:
    """Import the test files and report what they hold.

    Args:
        session: A fresh session.
        recorder: For the directory of the test files. Its conftest.py files count, those above it (the agent's tree) do not.
        report: Receives one ``collected`` record with every id, duplicates included, and the collection errors.
        only: Absolute paths of the files to collect; None for the whole directory.
        ignored: Files, relative to the tests directory, to leave out.

    Returns:
        id -> test items in pytest's order; more than one item means a duplicated id.
    """
    manager = session.config.pluginmanager
    manager._noconftest = False
    manager._confcutdir = Path(recorder.tests_dir)
    manager.register(recorder, "t1-recorder")
    session.config.option.ignore = [f"{recorder.tests_dir}/{name}" for name in ignored]
    try:
        session.perform_collect([recorder.tests_dir] if only is None else list(only))
    except (pytest.UsageError, pytest.exit.Exception) as error:
        recorder.errors.append(f": {type(error).__name__}: {error}"[:MESSAGE_LIMIT])
    items: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        items.setdefault(recorder.relative(item.nodeid), []).append(item)
    report({"kind": "collected", "ids": [recorder.relative(item.nodeid) for item in session.items], "errors": recorder.errors})
    return items


def run_tests(session: Session, recorder: Recorder, chosen: Sequence[tuple[str, pytest.Item]], report: Report) -> None:
    """Run tests one after the other in this process, as pytest would, reporting each start and each verdict.

    Args:
        session: The session that collected them.
        recorder: What `collect_tests` returned.
        chosen: (id, item) in the order to run.
        report: Receives ``start`` and ``verdict`` records.
    """
    for index, (name, item) in enumerate(chosen):
        report({"kind": "start", "id": name})
        recorder.reports = []
        following = chosen[index + 1][1] if index + 1 < len(chosen) else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        report({"kind": "verdict", "id": name, **recorder.verdict()})


class Recorder:
    """The pytest plugin that turns reports into verdicts.

    Args:
        tests_dir: Absolute directory of the test files.
    """

    def __init__(self, tests_dir: str) -> None:
        self.tests_dir = tests_dir
        self.prefix = tests_dir.strip("/") + "/"
        self.reports: list[pytest.TestReport] = []
        self.errors: list[str] = []
        self.collecting = ""
        """The file that is being imported, relative to the tests directory; empty between files."""

    def relative(self, nodeid: str) -> str:
        """Node id relative to the tests directory."""
        return nodeid.removeprefix(self.prefix)

    def verdict(self) -> dict[str, Any]:
        """Judge the test whose reports were just collected. Only three plain passes (setup, call, teardown) are a pass."""
        seconds = sum(report.duration for report in self.reports)
        status, message = "passed", ""
        for report in self.reports:
            reason = str(report.longrepr or "")
            if report.failed:
                status, message = ("failed" if report.when == "call" else "error"), reason
                break
            if hasattr(report, "wasxfail"):
                status, message = "error", f"xfail mark: {'xpassed' if report.passed else 'xfailed'}"
            elif report.skipped:
                status, message = "error", f"skipped: {reason}"
        if status == "passed" and [report.when for report in self.reports if report.passed] != ["setup", "call", "teardown"]:
            status, message = "error", "the test did not run to its end"
        return {"status": status, "seconds": round(seconds, 6), "message": message[:MESSAGE_LIMIT]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of one phase."""
        self.reports.append(report)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Note which file is being imported."""
        self.collecting = self.relative(collector.nodeid) if isinstance(collector, pytest.File) else ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be collected, or was skipped as a whole."""
        self.collecting = ""
        if report.passed:
            return
        lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
        reason = lines[-1].removeprefix("E").strip() if lines else report.outcome
        self.errors.append(f"{self.relative(report.nodeid)}: {reason}"[:MESSAGE_LIMIT])

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Replace pytest's report: same outcome, a one-line reason. The wrappers for xfail and unittest still apply."""
        outcome: Any = "passed"
        reason: str | None = None
        if call.excinfo is not None:
            outcome = "skipped" if isinstance(call.excinfo.value, pytest.skip.Exception) else "failed"
            reason = self._reason(call.excinfo)
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=outcome,
            longrepr=reason,
            when=call.when,  # type: ignore[arg-type]  # "collect" never reaches this hook
            duration=call.duration,
            start=call.start,
            stop=call.stop,
        )

    def _reason(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        """``file:line: Error: text`` with the innermost line that lies in the tests directory."""
        where = ""
        traceback: TracebackType | None = excinfo.tb
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if file.startswith(self.tests_dir):
                where = f"{os.path.relpath(file, self.tests_dir)}:{traceback.tb_lineno}: "
            traceback = traceback.tb_next
        return where + " ".join(excinfo.exconly(tryshort=True).split())


@contextmanager
def _environment_without_pytest() -> Iterator[None]:
    """Hide ``PYTEST_*`` variables (added options, plugins) and forbid plugin discovery while options are parsed."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PYTEST_")}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update(hidden)
