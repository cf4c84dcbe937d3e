"""Verifiers of executed-programs: programs of the system say whether the files are right."""

import subprocess
from pathlib import Path

APP = Path("/app")


def run(*command: str) -> str:
    """What a program prints; it must succeed."""
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def test_sorted() -> None:
    """1. sort says that the names are sorted."""
    assert len((APP / "names.txt").read_text().split()) == 5
    run("sort", "-c", "/app/names.txt")


def test_copy() -> None:
    """2. cmp says that both files are the same."""
    assert (APP / "letter.txt").read_text() == "Dear all,\n\nthe harvest is in.\n"
    run("cmp", "/app/letter.txt", "/app/copy.txt")


def test_report() -> None:
    """3. python3 runs it to its end."""
    assert "total" in (APP / "report.py").read_text()
    run("python3", "/app/report.py")


def test_greeting() -> None:
    """4. bash understands it."""
    assert "hello" in (APP / "greet.sh").read_text()
    run("bash", "-n", "/app/greet.sh")


def test_committed() -> None:
    """5. git sees nothing that is not committed."""
    assert (APP / "notes" / "monday.txt").is_file()
    assert run("git", "-C", "/app/notes", "status", "--porcelain") == ""


def test_stock() -> None:
    """6. sqlite3 finds no row with a negative amount."""
    assert (APP / "stock.csv").read_text().count("\n") == 4
    assert run("sqlite3", "/app/stock.db", "select name from stock where amount < 0") == ""
