"""Verifiers of greenhouse-config: one test for each requirement of the instruction."""

from pathlib import Path

CONF = Path("/app/etc/greenhouse.conf")
BACKUP = Path("/app/etc/greenhouse.conf.bak")

ORIGINAL = """\
# greenhouse controller, house 3
[climate]
day_temp = 24
night_temp = 16
# percent
humidity = 60

[light]
start = 05:30
hours = 14

[water]
start = 05:30
minutes = 10
debug = true

[alerts]
mail = off
# night_temp is watched as well
low_temp = 8
"""
CHANGED = {
    "night_temp = 16",
    "debug = true",
    "mail = off",
    "night_temp = 14",
    "start = 06:15",
    "start = 05:30",
    "pause = sunday",
    "mail = on",
}


def section(name: str) -> list[str]:
    """Lines of one section, without empty lines."""
    lines = CONF.read_text().splitlines()
    start = lines.index(f"[{name}]") + 1
    end = next((number for number in range(start, len(lines)) if lines[number].startswith("[")), len(lines))
    return [line for line in lines[start:end] if line]


def unchanged(text: str) -> list[str]:
    """Lines that no requirement touches."""
    return [line for line in text.splitlines() if line and line not in CHANGED]


def test_night_temp() -> None:
    """1. night_temp of climate is 14."""
    assert "night_temp = 14" in section("climate")
    assert "night_temp = 16" not in section("climate")


def test_water_start() -> None:
    """2. start of water is 06:15."""
    assert "start = 06:15" in section("water")
    assert "start = 05:30" not in section("water")


def test_light_keeps_its_time() -> None:
    """2. The lights keep their time (once the water has its own)."""
    assert "start = 06:15" in section("water")
    assert section("light") == ["start = 05:30", "hours = 14"]


def test_debug_is_gone() -> None:
    """3. water has no debug setting."""
    assert not any(line.startswith("debug") for line in section("water"))


def test_pause_is_new() -> None:
    """3. water has the setting pause, once."""
    assert section("water").count("pause = sunday") == 1
    assert CONF.read_text().count("pause") == 1


def test_mail_is_on() -> None:
    """4. mail of alerts is on."""
    assert "mail = on" in section("alerts")
    assert "mail = off" not in section("alerts")


def test_other_lines_stay() -> None:
    """5. All other lines stay in their order (once something has changed)."""
    assert CONF.read_text() != ORIGINAL
    assert unchanged(CONF.read_text()) == unchanged(ORIGINAL)


def test_backup() -> None:
    """6. The backup is the file as it was."""
    assert BACKUP.read_text() == ORIGINAL
