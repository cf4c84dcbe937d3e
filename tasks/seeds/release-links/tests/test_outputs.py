"""Verifiers of release-links: one test for each requirement of the instruction."""

from pathlib import Path

APP = Path("/app")
RELEASES = ("1.2", "1.9", "1.10")


def mode(path: str) -> int:
    """Permission bits of a path under /app."""
    return (APP / path).stat().st_mode & 0o777


def test_current_is_the_newest() -> None:
    """1. current leads to release 1.10."""
    assert (APP / "current").is_symlink()
    assert (APP / "current").resolve() == APP.resolve() / "releases" / "1.10"


def test_current_is_relative() -> None:
    """1. The link is relative, and leads somewhere."""
    assert (APP / "current" / "run.sh").is_file()
    assert not (APP / "current").readlink().is_absolute()


def test_version() -> None:
    """2. VERSION holds the version."""
    assert (APP / "VERSION").read_text() == "1.10\n"


def test_scripts() -> None:
    """3. Every run.sh has mode 755 and its text."""
    for release in RELEASES:
        assert mode(f"releases/{release}/run.sh") == 0o755
        assert (APP / f"releases/{release}/run.sh").read_text() == f"#!/bin/bash\necho release {release}\n"


def test_settings() -> None:
    """4. Every settings.env has mode 600."""
    assert [mode(f"releases/{release}/settings.env") for release in RELEASES] == [0o600] * 3


def test_directories() -> None:
    """5. Every release directory has mode 755."""
    assert [mode(f"releases/{release}") for release in RELEASES] == [0o755] * 3


def test_dead_links_are_gone() -> None:
    """6. The links that lead nowhere are gone."""
    assert (APP / "links").is_dir()
    assert not (APP / "links" / "old").is_symlink()
    assert not (APP / "links" / "next").is_symlink()


def test_good_links_are_kept() -> None:
    """6. The others are kept (once the dead ones are gone)."""
    assert sorted(path.name for path in (APP / "links").iterdir()) == ["run", "stable"]
    assert (APP / "links" / "run").resolve() == APP.resolve() / "releases" / "1.10" / "run.sh"
