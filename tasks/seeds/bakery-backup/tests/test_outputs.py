"""Verifiers of bakery-backup: one test for each requirement of the instruction."""

import tarfile
from pathlib import Path

BACKUP = Path("/app/backup")
RECIPES = Path("/app/recipes")


def test_newest_intact_archive_is_restored() -> None:
    """1. The bread recipe is Tuesday's."""
    assert (RECIPES / "bread.txt").read_text() == "flour 500\nwater 350\nsalt 11\n"


def test_directories_are_restored() -> None:
    """1. So is what lies in directories below."""
    assert (RECIPES / "sweet" / "scones.txt").read_text() == "butter 110\nflour 200\nraisins 40\n"


def test_no_tmp_files() -> None:
    """2. Nothing that ends in .tmp is left among the restored files."""
    assert (RECIPES / "bread.txt").is_file()
    assert list(RECIPES.rglob("*.tmp")) == []


def test_damaged_archives_are_named() -> None:
    """3. damaged.txt holds their names."""
    assert (BACKUP / "damaged.txt").read_text() == "wednesday.tar.gz\n"


def test_damaged_archives_are_deleted() -> None:
    """4. The damaged archive is gone."""
    assert BACKUP.is_dir()
    assert not (BACKUP / "wednesday.tar.gz").exists()


def test_intact_archives_are_kept() -> None:
    """4. Both intact archives are still there and readable (once the damaged one is gone)."""
    assert not (BACKUP / "wednesday.tar.gz").exists()
    for name in ("monday.tar.gz", "tuesday.tar.gz"):
        with tarfile.open(BACKUP / name, "r:gz") as archive:
            assert "./bread.txt" in archive.getnames()


def test_clean_archive() -> None:
    """5. clean.tar is an uncompressed archive of exactly the recipes, with relative names."""
    with tarfile.open(BACKUP / "clean.tar", "r:") as archive:
        names = {member.name.removeprefix("./") for member in archive.getmembers() if member.isfile()}
    assert names == {"bread.txt", "sweet/scones.txt"}
