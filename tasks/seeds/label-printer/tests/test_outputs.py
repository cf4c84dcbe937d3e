"""Verifiers of label-printer: one test for each requirement of the instruction, on lists the agent has not seen."""

import subprocess
import tempfile
from pathlib import Path

SCRIPT = Path("/app/bin/labels.sh")
SPRING = "# spring order\nsweet pea;B2\nbasil;A1\n\nlong red radish;C10\nchives;A3"


def labels(text: str) -> list[str]:
    """What the script prints for a list with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a list.txt"
        path.write_text(text)
        done = subprocess.run(["bash", str(SCRIPT), str(path)], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.splitlines()


def test_prints_labels() -> None:
    """1. Shelf, colon, space, name."""
    assert labels("dill;D4\nmint;A2\n") == ["D4: dill", "A2: mint"]


def test_names_of_several_words() -> None:
    """1. Names may hold several words."""
    assert labels("early white onion;E11\n") == ["E11: early white onion"]


def test_comments_and_empty_lines() -> None:
    """2. Empty lines and lines that start with # are left out."""
    assert labels("# herbs\n\nsage;B7\n\n#thyme;B8\n") == ["B7: sage"]


def test_last_line_without_newline() -> None:
    """3. The last line counts even if no newline follows it."""
    assert labels("leek;F1\nkale;F2") == ["F1: leek", "F2: kale"]


def test_missing_list() -> None:
    """4. A message to standard error, nothing to standard output, status 2."""
    done = subprocess.run(["bash", str(SCRIPT), "/app/lists/none.txt"], capture_output=True, timeout=10, check=False)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.strip()


def test_everyone_may_run_it() -> None:
    """5. Everyone may run it, only its owner may write it."""
    mode = SCRIPT.stat().st_mode & 0o777
    assert mode & 0o111 == 0o111
    assert mode & 0o222 == 0o200


def test_spring_labels() -> None:
    """The labels of the spring list are saved, and the list is as it was."""
    expected = ["B2: sweet pea", "A1: basil", "C10: long red radish", "A3: chives"]
    assert Path("/app/out/spring.txt").read_text().splitlines() == expected
    assert Path("/app/lists/spring.txt").read_text() == SPRING
