"""Verifiers of night-shift-logs: one test for each requirement of the instruction."""

import gzip
from pathlib import Path

LOGS = Path("/app/logs")
REPORT = Path("/app/report")

ALARMS = [
    "22:58:47 ALARM pump pressure 5.2",
    "23:15:02 ALARM fan belt slips",
    "23:15:09 ALARM pump pressure 5.4",
    "01:40:12 ALARM pump pressure 5.1",
    "04:59:30 ALARM fan belt slips",
]
PUMP_LOG = """\
22:00:03 INFO pump pressure 3.9
22:58:47 ALARM pump pressure 5.2
23:15:09 ALARM pump pressure 5.4
01:02:30 INFO pump valve opened by hand
01:40:12 ALARM pump pressure 5.1
05:30:00 INFO pump pressure 4.0
"""


def report(name: str) -> list[str]:
    """Lines of a file under /app/report."""
    return (REPORT / name).read_text().splitlines()


def test_alarms_are_complete() -> None:
    """1. Every line of level ALARM, and no other, is in alarms.txt."""
    assert sorted(report("alarms.txt")) == sorted(ALARMS)


def test_alarms_are_in_order() -> None:
    """1. In the order in which they happened, the evening before the morning."""
    assert report("alarms.txt") == ALARMS


def test_counts() -> None:
    """2. One line for each machine, in alphabetical order, those without alarms included."""
    assert report("counts.txt") == ["fan 2", "pump 3", "valve 0"]


def test_first_machine() -> None:
    """3. The machine with the first alarm of the shift."""
    assert report("first.txt") == ["pump"]


def test_busiest_log_is_compressed() -> None:
    """4. A gzip copy of the log with the most alarms."""
    assert gzip.decompress((REPORT / "pump.log.gz").read_bytes()).decode() == PUMP_LOG


def test_logs_are_untouched() -> None:
    """5. The logs are as they were (once there is a report)."""
    assert report("alarms.txt")
    assert (LOGS / "pump.log").read_text() == PUMP_LOG
    assert sorted(path.name for path in LOGS.iterdir()) == ["fan.log", "pump.log", "valve.log"]
    assert len((LOGS / "fan.log").read_text().splitlines()) == 6
    assert len((LOGS / "valve.log").read_text().splitlines()) == 3
