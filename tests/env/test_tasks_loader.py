"""Ids, paths, patterns, queries and lists; malformed directories."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from t1_env.errors import ConfigError, TaskError, UnknownTask
from t1_env.tasks import TaskWarning, list_tasks, load_task, resolve_tasks
from t1_env.tasks.corpus import corpus_root
from t1_env.tasks.families import SPLITS


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T1_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def own_task(tmp_path) -> Path:
    """A copy of the smallest task that a test may break."""
    return Path(shutil.copytree(corpus_root() / "seeds" / "hello-file", tmp_path / "own" / "hello-file"))


class TestLoading:
    def test_by_id(self):
        task = load_task("seeds/hello-file")
        assert task.id == "seeds/hello-file"
        assert "hello.txt" in task.instruction
        assert task.workdir == "/app"
        assert task.tests_dir.is_dir()
        assert task.environment_dir.is_dir()
        assert task.oracle_steps() == ("echo hi > hello.txt",)
        assert {slip.kind for slip in task.slips()} == {"empty-file", "no-newline", "wrong-word"}

    def test_by_path_inside_the_corpus_it_keeps_its_id(self):
        assert load_task(corpus_root() / "seeds" / "hello-file").id == "seeds/hello-file"

    def test_by_path_elsewhere_it_is_called_after_its_directory(self, own_task, monkeypatch):
        assert load_task(own_task).id == "hello-file"
        assert load_task(str(own_task)).path == own_task
        monkeypatch.chdir(own_task.parent)
        assert load_task("./hello-file").path == own_task
        assert load_task("hello-file").path == own_task

    def test_by_instance_id(self):
        task = load_task("families/tidy-files?level=2&seed=7")
        assert task.id == "families/tidy-files?level=2&seed=7"
        assert (task.metadata.family, task.metadata.level, task.metadata.seed, task.metadata.split) == ("tidy-files", 2, 7, "train")

    def test_digest_follows_contents_and_executable_bits_only(self, own_task):
        first = load_task(own_task).digest
        assert first == load_task("seeds/hello-file").digest
        (own_task / "tests" / "__pycache__").mkdir(exist_ok=True)  # an installer may have compiled the tests already
        (own_task / "tests" / "__pycache__" / "x.pyc").write_bytes(b"x")
        (own_task / "instruction.md").chmod(0o600)
        assert load_task(own_task).digest == first
        (own_task / "tests" / "test.sh").chmod(0o644)
        second = load_task(own_task).digest
        assert second != first
        (own_task / "tests" / "extra.txt").write_text("")
        assert load_task(own_task).digest not in (first, second)

    def test_without_a_workdir_in_the_toml_the_dockerfile_decides(self, own_task):
        toml = own_task / "task.toml"
        toml.write_text(toml.read_text().replace('workdir = "/app"\n', ""))
        (own_task / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /srv\nWORKDIR data\n")
        assert load_task(own_task).workdir == "/srv/data"

    def test_a_task_without_an_oracle_has_no_steps(self, own_task):
        shutil.rmtree(own_task / "solution")
        task = load_task(own_task)
        assert task.solution_path is None
        assert task.oracle_steps() == ()
        assert task.slips() == ()

    def test_unknown_keys_warn(self, own_task):
        with (own_task / "task.toml").open("a") as file:
            file.write("colour = 'red'\n")
        with pytest.warns(TaskWarning, match=r"environment\.colour"):
            load_task(own_task)


class TestMalformed:
    @pytest.mark.parametrize(
        ("remove", "said"),
        [
            ("task.toml", "task.toml is missing"),
            ("instruction.md", "instruction.md is missing"),
            ("tests", r"expected test\.sh"),
            ("environment", "Dockerfile is missing"),
        ],
    )
    def test_a_missing_part_is_named(self, own_task, remove, said):
        path = own_task / remove
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(TaskError, match=said):
            load_task(own_task)

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("instruction.md", b" \n", "instruction.md is empty"),
            ("instruction.md", b"\xff\xfe", "not valid UTF-8 at byte 0"),
            ("task.toml", b"\x80", "not valid UTF-8"),
            ("task.toml", b"[[steps]]\nname = 'a'\n", "multi-step tasks are not supported"),
            ("solution/solve.sh", b"# step: nothing\n", "holds no command"),
            ("solution/slips.json", b"[{}]", "slip 0"),
        ],
    )
    def test_bad_content_is_named(self, own_task, name, content, said):
        (own_task / name).write_bytes(content)
        with pytest.raises(TaskError, match=said):
            load_task(own_task).slips()

    def test_a_link_out_of_the_task_is_refused(self, own_task):
        (own_task / "tests" / "secret").symlink_to("/etc/hostname")
        with pytest.raises(TaskError, match="outside the task directory"):
            load_task(own_task)

    def test_a_pipe_is_refused(self, own_task):
        subprocess.run(["mkfifo", str(own_task / "tests" / "pipe")], check=True)
        with pytest.raises(TaskError, match="expected a file"):
            load_task(own_task)

    def test_the_old_format_is_recognised(self, own_task):
        (own_task / "task.toml").rename(own_task / "task.yaml")
        with pytest.raises(TaskError, match="Terminal-Bench 1"):
            load_task(own_task)


class TestUnknown:
    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("seeds/helo-file", "did you mean 'seeds/hello-file'"),
            ("hello-file", "did you mean 'seeds/hello-file'"),
            ("tidy-files", "did you mean 'families/tidy-files'"),
            ("families/tidy-file", "did you mean 'families/tidy-files'"),
            ("", "is empty"),
            ("seeds/hello-file\0", "NUL"),
            ("./nowhere", "no task directory"),
            ("/nowhere", "no task directory"),
            ("nothing-like-it/*", "no task answers"),
            ("families/tidy-files?level=9", "no level 9; it has 1, 2, 3"),
            ("families/tidy-files?level=x", "level = 'x'"),
            ("families/tidy-files?level=1&level=2", "given twice"),
            ("families/tidy-files?seed=-1", "seed = '-1'"),
            ("families/tidy-files?seed=1500000", "belongs to no split"),
            ("families/tidy-files?seed=7&split=test", "belongs to the train split, not to test"),
            ("families/tidy-files?split=val", "expected one of train, dev, test"),
            ("families/tidy-files?n=0", "n = 0"),
            ("families/tidy-files?seed=1&n=2", "exclude each other"),
            ("families/tidy-files?hardness=1", "unknown key 'hardness'"),
        ],
    )
    def test_the_message_says_what_to_do(self, spec, said):
        with pytest.raises(UnknownTask) as caught:
            resolve_tasks(spec)
        assert said in str(caught.value)
        with pytest.raises(UnknownTask):
            load_task(spec)

    @pytest.mark.parametrize("spec", [5, None, [None], {"seeds/hello-file"}])
    def test_other_kinds_of_things_are_refused(self, spec):
        with pytest.raises(TaskError, match="must be an id"):
            resolve_tasks(spec)

    def test_an_empty_list_is_refused(self):
        with pytest.raises(UnknownTask, match="empty"):
            resolve_tasks([])

    def test_one_task_is_not_several(self):
        with pytest.raises(UnknownTask, match="expected exactly one"):
            load_task("families/*")

    def test_a_search_directory_must_exist(self, tmp_path):
        with pytest.raises(ConfigError, match="not a directory"):
            resolve_tasks("seeds/hello-file", search=[tmp_path / "none"])


class TestSources:
    def test_list_tasks_names_everything_and_everything_resolves(self):
        ids = list_tasks()
        assert list(ids) == sorted(ids)
        assert "seeds/hello-file" in ids
        assert {f"families/tidy-files?level={level}" for level in (1, 2, 3)} <= set(ids)
        for task_id in ids:
            assert len(resolve_tasks(task_id)) >= 1

    def test_patterns(self):
        source = resolve_tasks("seeds/*")
        assert list(source.ids()) == [name for name in list_tasks() if name.startswith("seeds/")]
        assert list(resolve_tasks("seeds/h[ae]*").ids()) == ["seeds/harvest-totals", "seeds/hello-file"]
        everything = resolve_tasks("families/*?level=2&n=1")
        assert len(everything) == len([name for name in list_tasks() if name.endswith("level=2")])

    def test_a_list_joins_its_parts(self, own_task):
        task = load_task("families/log-tally?level=1&seed=4")
        source = resolve_tasks(["seeds/hello-file", own_task, task, "families/tidy-files?level=1&n=2"])
        assert list(source.ids()) == [
            "seeds/hello-file",
            "hello-file",
            "families/log-tally?level=1&seed=4",
            "families/tidy-files?level=1&seed=0",
            "families/tidy-files?level=1&seed=1",
        ]
        assert len(source) == 5

    def test_sampling_is_a_pure_function_of_its_seed(self):
        source, again = (resolve_tasks(["seeds/*", "families/tidy-files?level=1"]) for _ in range(2))
        drawn = [source.sample(seed).id for seed in range(40)]
        assert drawn == [again.sample(seed).id for seed in reversed(range(40))][::-1]
        assert len(set(drawn)) > 5
        assert any(task_id.startswith("families/") for task_id in drawn)

    @pytest.mark.parametrize("split", SPLITS)
    def test_a_split_draws_from_its_own_seeds(self, split):
        source = resolve_tasks(f"families/tidy-files?level=1&split={split}")
        for seed in range(20):
            metadata = source.sample(seed).metadata
            assert metadata.split == split
            assert metadata.seed in SPLITS[split]

    def test_the_default_split_is_train(self):
        assert resolve_tasks("families/tidy-files").sample(1).metadata.split == "train"

    def test_splits_do_not_overlap(self):
        ranges = sorted(SPLITS.values(), key=lambda seeds: seeds.start)
        assert all(before.stop <= after.start for before, after in itertools.pairwise(ranges))

    def test_get_finds_own_tasks_and_any_other_id(self, own_task):
        source = resolve_tasks([own_task, "families/tidy-files?level=1"])
        assert source.get("hello-file").path == own_task
        assert source.get("families/tidy-files?level=1&seed=9").metadata.seed == 9
        assert source.get("seeds/hello-file").id == "seeds/hello-file"
        with pytest.raises(UnknownTask):
            source.get("seeds/none")

    def test_a_search_directory_comes_before_the_corpus(self, own_task):
        (own_task.parent.parent / "corpus" / "seeds").mkdir(parents=True)
        target = shutil.copytree(own_task, own_task.parent.parent / "corpus" / "seeds" / "hello-file")
        (Path(target) / "instruction.md").write_text("Mine.\n")
        search = [own_task.parent.parent / "corpus"]
        assert resolve_tasks("seeds/hello-file", search=search).sample(0).instruction == "Mine."
        assert load_task("seeds/hello-file", search=search).instruction == "Mine."
        assert load_task("seeds/harvest-totals", search=search).id == "seeds/harvest-totals"
