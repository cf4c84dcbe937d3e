"""Verifiers of executed-script: a script of the agent is asked what it has not been told."""

import subprocess

import pytest

CASES = [("4", "IV"), ("19", "XIX"), ("448", "CDXLVIII"), ("2026", "MMXXVI")]


@pytest.mark.parametrize(("number", "numeral"), CASES)
def test_numeral(number: str, numeral: str) -> None:
    """It prints that number in Roman numerals."""
    done = subprocess.run(["bash", "/app/roman.sh", number], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == numeral
