"""Seeded families: pure, byte-identical everywhere, well-formed; written once and safely."""

import ast
import concurrent.futures
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from t1_env.errors import ConfigError, TaskError, UnknownTask
from t1_env.tasks import list_tasks, load_task
from t1_env.tasks.check import lint_task
from t1_env.tasks.corpus import corpus_root, family_files
from t1_env.tasks.families import SPLITS, cache_dir, generate, load_family, materialise, render, split_of
from t1_env.tasks.instance import MAX_VERIFIERS, Builder
from t1_env.tasks.task import content_digest, directory_digest
from t1_env.tasks.words import NAMES, PLACES, USERS

FAMILIES = dict(family_files(corpus_root()))
CASES = [(name, level) for name in FAMILIES for level in load_family(FAMILIES[name]).levels]
SEEDS = (0, 1, 2, 3, 77, 999_999, 1_000_000, 2_000_000)


def family(name):
    return load_family(FAMILIES[name])


def digest_of(name: str, level: int, seeds) -> str:
    """One digest over the full contents of several instances."""
    total = hashlib.sha256()
    for seed in seeds:
        files = render(family(name), level, seed, generate(family(name), level, seed))
        total.update(content_digest((path, content, run) for path, (content, run) in files.items()).encode())
    return total.hexdigest()[:16]


# Changing what a family generates changes these on purpose: say so in the commit, because results on old instances no longer compare.
GOLDEN = {
    ("access-modes", 1): "2a9e2c9b3ae5ef22",
    ("access-modes", 2): "193a6101885c6b92",
    ("access-modes", 3): "4af1dd30b9fe88f9",
    ("hand-over", 1): "570c9605fdb5b25d",
    ("hand-over", 2): "635f47f500f2b5d3",
    ("hand-over", 3): "dec6e0de25b6b5cd",
    ("log-tally", 1): "834cfb2c21015e9d",
    ("log-tally", 2): "0ce2841612552697",
    ("log-tally", 3): "8ca3f4b3d490359a",
    ("records-merge", 1): "8f21d3d8de25bfbd",
    ("records-merge", 2): "3a559cf1ebf50ed3",
    ("records-merge", 3): "0f3e8beeb153b3a8",
    ("tidy-files", 1): "5e67fb34a50e3465",
    ("tidy-files", 2): "a7e7db75d4afad5a",
    ("tidy-files", 3): "8e7c09e47dca2076",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T1_CACHE_DIR", str(tmp_path / "cache"))


def test_there_are_the_families_the_corpus_promises():
    assert {"tidy-files", "log-tally", "access-modes", "records-merge", "hand-over"} <= set(FAMILIES)
    assert len([name for name in list_tasks() if name.startswith("seeds/")]) >= 6


@pytest.mark.parametrize(("name", "level"), CASES)
def test_instances_are_byte_identical_everywhere(name, level):
    assert digest_of(name, level, SEEDS) == GOLDEN[name, level]


def test_another_process_with_other_settings_generates_the_same():
    code = (
        "import sys; from t1_env.tasks.corpus import *; from t1_env.tasks.families import *; from t1_env.tasks.task import content_digest\n"
        "for name, path in family_files(corpus_root()):\n"
        "    f = load_family(path)\n"
        "    files = render(f, 2, 5, generate(f, 2, 5))\n"
        "    print(name, content_digest((p, c, r) for p, (c, r) in files.items()))\n"
    )
    outputs = set()
    for hash_seed, zone in (("1", "Asia/Tokyo"), ("2", "UTC")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone, "LC_ALL": "C", "COLUMNS": hash_seed}
        outputs.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == len(FAMILIES)


@pytest.mark.parametrize(("name", "level"), CASES)
def test_instances_are_well_formed(name, level):
    """What the issue promises of every instance, over many seeds."""
    n_steps = {1: range(3, 7), 2: range(6, 13), 3: range(10, 25)}[level]
    for seed in range(60):
        instance = generate(family(name), level, seed)
        assert len(instance.steps) in n_steps
        assert len(instance.slips) >= 4
        tests = [
            node.name for node in ast.parse(instance.tests).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert len(tests) == len(set(tests))
        assert 3 <= len(tests) <= MAX_VERIFIERS
        for slip in instance.slips:
            assert slip.command != instance.steps[slip.step].command
        if level == 1:
            assert len(instance.instruction.split()) <= 50
            assert all(len(step.command) <= 60 for step in instance.steps)
        assert instance.instruction.isascii()
        for path, file in instance.files.items():
            assert not path.startswith("/")
            assert 0 < len(file.content) <= 400


@pytest.mark.parametrize(("name", "level"), CASES)
def test_splits_share_no_instance(name, level):
    seen: dict[str, str] = {}
    for split, seeds in SPLITS.items():
        for seed in seeds[:150]:
            instance = generate(family(name), level, seed)
            # Level 1 has few words, so two instructions may agree; instruction and files together never do.
            assert seen.setdefault(instance.instruction + repr(sorted(instance.files.items())), split) == split
            assert split_of(seed) == split


@pytest.mark.parametrize("name", FAMILIES)
def test_decisions_vary(name):
    """Names aside, no few sequences of commands fit all instances, and there are several ways to go wrong."""
    names = {*NAMES, *PLACES}
    skeletons, kinds = set(), set()
    for seed in range(100):
        instance = generate(family(name), 1, seed)
        words = [word for step in instance.steps for word in step.command.split()]
        skeletons.add(tuple(word for word in words if word not in names and "/" not in word))
        kinds |= {slip.kind for slip in instance.slips}
    assert len(skeletons) >= 4
    assert len(kinds) >= 5


@pytest.mark.parametrize(("name", "level"), CASES)
def test_materialised_instances_are_sound_directories(name, level):
    path = materialise(family(name), level, 3)
    task = load_task(path)
    assert lint_task(task) == ()
    assert task.metadata.family == name
    assert {file.relative_to(path).parts[0] for file in path.rglob("*")} == {
        "environment",
        "instruction.md",
        "solution",
        "task.toml",
        "tests",
    }
    assert os.access(path / "tests" / "test.sh", os.X_OK)
    assert task.oracle_steps() == tuple(step.command for step in generate(family(name), level, 3).steps)
    assert task.slips() == generate(family(name), level, 3).slips


class TestCache:
    def test_an_instance_is_written_once(self):
        first = materialise(family("tidy-files"), 1, 5)
        stamp = (first / "task.toml").stat().st_mtime_ns
        assert materialise(family("tidy-files"), 1, 5) == first
        assert (first / "task.toml").stat().st_mtime_ns == stamp

    @pytest.mark.parametrize("damage", ["changed", "lost", "added"])
    def test_a_damaged_instance_is_written_again(self, damage):
        path = materialise(family("tidy-files"), 1, 5)
        whole = directory_digest(path)
        if damage == "changed":
            (path / "instruction.md").write_text("something else")
        elif damage == "lost":
            shutil.rmtree(path / "tests")
        else:
            (path / "tests" / "test_more.py").write_text("")
        assert directory_digest(materialise(family("tidy-files"), 1, 5)) == whole

    def test_many_threads_agree_and_leave_nothing_behind(self):
        def work(number):
            return materialise(family("log-tally"), 1, number % 4)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            paths = list(pool.map(work, range(64)))
        assert len(set(paths)) == 4
        assert [path for path in cache_dir().rglob(".new-*")] == []
        for path in set(paths):
            assert lint_task(load_task(path)) == ()

    def test_many_processes_agree(self):
        code = "from t1_env.tasks import load_task; print(load_task('families/access-modes?level=1&seed=8').digest)"
        running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        digests = {process.communicate()[0] for process in running}
        assert len(digests) == 1
        assert all(process.returncode == 0 for process in running)
        assert len(list(cache_dir().glob("*/access-modes-1-8-*"))) == 1

    def test_umask_does_not_matter(self):
        before = os.umask(0o077)
        try:
            path = materialise(family("tidy-files"), 1, 6)
        finally:
            os.umask(before)
        assert (path / "tests" / "test.sh").stat().st_mode & 0o777 == 0o755
        assert (path / "instruction.md").stat().st_mode & 0o777 == 0o644

    def test_a_cache_that_cannot_be_written_is_one_clear_error(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("T1_CACHE_DIR", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="T1_CACHE_DIR"):
            materialise(family("tidy-files"), 1, 5)

    def test_where_the_cache_is(self, monkeypatch, tmp_path):
        monkeypatch.setenv("T1_CACHE_DIR", str(tmp_path))
        assert cache_dir() == tmp_path / "instances"
        monkeypatch.delenv("T1_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_dir() == tmp_path / "xdg" / "t1-env" / "instances"
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_dir() == tmp_path / ".cache" / "t1-env" / "instances"


class TestForeignFamilies:
    GOOD = (
        "from t1_env.tasks.instance import Builder\n"
        "NAME = 'mine'\nDESCRIPTION = 'd'\nCATEGORY = 'c'\nLEVELS = (1,)\n"
        "def generate(seed, level):\n"
        "    build = Builder(NAME, level, seed)\n"
        "    build.say('make a')\n    build.step('make a', 'touch a')\n"
        "    build.test('a', 'make a', 'assert (APP / \"a\").is_file()')\n"
        "    return build.build()\n"
    )

    def write(self, root: Path, text: str) -> Path:
        path = root / "families" / "mine" / "family.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    def test_a_family_of_ones_own_is_found_by_search(self, tmp_path):
        self.write(tmp_path, self.GOOD)
        assert "families/mine?level=1" in list_tasks(search=[tmp_path])
        assert load_task("families/mine?seed=4", search=[tmp_path]).instruction == "make a"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("def (", "SyntaxError"),
            ("raise RuntimeError('boom')", "RuntimeError: boom"),
            ("NAME = 'mine'\n", "DESCRIPTION = None"),
            (GOOD.replace("'mine'", "'other'"), "expected the name of its directory, 'mine'"),
            (GOOD.replace("(1,)", "()"), "non-empty tuple"),
            (GOOD.replace("(1,)", "('1',)"), "non-empty tuple"),
            (GOOD.replace("generate", "make"), "generate = None"),
        ],
    )
    def test_a_broken_family_is_named(self, tmp_path, text, said):
        path = self.write(tmp_path, text)
        with pytest.raises(TaskError) as caught:
            load_family(path)
        assert said in str(caught.value)
        assert str(path) in str(caught.value)

    def test_levels_and_seeds_are_checked(self):
        with pytest.raises(UnknownTask, match="no level 4"):
            generate(family("tidy-files"), 4, 0)
        with pytest.raises(UnknownTask, match="no split"):
            generate(family("tidy-files"), 1, 5_000_000)


class TestBuilder:
    def test_streams_do_not_disturb_each_other(self):
        one, two = Builder("f", 1, 1), Builder("f", 1, 1)
        one.stream("a").random()
        assert one.stream("b").random() == two.stream("b").random()
        assert one.stream("a").random() != one.stream("b").random()

    def test_words_are_drawn_once(self):
        build = Builder("f", 2, 1)
        assert sorted(build.draw() for _ in NAMES) == sorted(NAMES)
        with pytest.raises(TaskError, match="draw fewer"):
            build.draw()

    def test_names_of_tests_are_unique(self):
        build = Builder("f", 1, 1)
        for mode in (600, 600, 640):
            build.test(f"mode_{mode}", "r", "assert True")
        assert "def test_mode_600()" in build.build().tests
        assert "def test_mode_600_nr_2()" in build.build().tests

    def test_many_requirements_share_verifiers_but_lose_no_assertion(self):
        build = Builder("f", 1, 1)
        for number in range(23):
            build.test(f"a{number}", f"line {number}", f"assert {number} >= 0")
            build.test(f"b{number}", f"line {number}", f"assert {number} >= 0", f"assert {number} < 99")
        source = build.build().tests
        assert source.count("def test_") == MAX_VERIFIERS
        for number in range(23):
            assert f"assert {number} >= 0\n" in source
            assert f"assert {number} < 99\n" in source

    def test_vocabulary_is_small_distinct_and_plain(self):
        words = [*NAMES, *PLACES, *USERS]
        assert len(words) == len(set(words))
        assert all(word.isascii() and word.isalpha() and word.islower() and len(word) <= 6 for word in words)
