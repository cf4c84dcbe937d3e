"""The worker on its own, forked from a warm interpreter that knows t1_env only as a stub package, as in a sandbox."""

import os

import pytest


def test_every_pytest_outcome_has_its_status(bench):
    bench.test_file("""
        import pytest
        def test_pass(): pass
        def test_fail(): assert 1 == 2
        def test_raise(): raise OSError("x")
        def test_skip(): pytest.skip("no")
        @pytest.mark.skipif(True, reason="r")
        def test_skipif(): pass
        @pytest.mark.xfail
        def test_xfail(): assert 0
        @pytest.mark.xfail
        def test_xpass(): pass
        @pytest.mark.xfail(strict=True)
        def test_strict_xpass(): pass
        @pytest.fixture
        def broken(): raise ValueError("setup")
        def test_setup_error(broken): pass
        @pytest.fixture
        def late():
            yield
            raise ValueError("teardown")
        def test_teardown_error(late): pass
        def test_unknown_fixture(nothing_of_the_kind): pass
        def test_exit(): pytest.exit("stop everything")
        def test_system_exit(): raise SystemExit(0)
        def test_after(): pass
    """)
    assert bench.statuses() == {
        "test_pass": "passed",
        "test_fail": "failed",
        "test_raise": "failed",
        "test_skip": "error",
        "test_skipif": "error",
        "test_xfail": "error",
        "test_xpass": "error",
        "test_strict_xpass": "failed",
        "test_setup_error": "error",
        "test_teardown_error": "error",
        "test_unknown_fixture": "error",
        "test_exit": "error",
        "test_system_exit": "failed",
        "test_after": "passed",
    }


def test_fixtures_marks_classes_and_conftest_of_the_tests_work(bench):
    (bench.tests / "conftest.py").write_text("import pytest, sibling\n@pytest.fixture(scope='session')\ndef n(): return sibling.N\n")
    (bench.tests / "sibling.py").write_text("N = 3\n")
    bench.test_file("""
        import unittest, warnings, pytest, sibling
        @pytest.mark.parametrize("x", [1, 2, "a b"])
        def test_param(x): assert x != 2
        class TestClass:
            @classmethod
            def setup_class(cls): cls.ready = True
            def test_method(self, tmp_path, n):
                assert self.ready and n == 3 and list(tmp_path.iterdir()) == []
        class TestUnit(unittest.TestCase):
            def setUp(self): self.x = 1
            def test_unit(self): self.assertEqual(self.x, 1)
            def test_unit_fails(self): self.assertEqual(self.x, 2)
            @unittest.skip("no")
            def test_unit_skipped(self): pass
        def test_monkeypatch(monkeypatch): monkeypatch.setenv("X", "1")
        def test_capsys(capsys):
            print("hi")
            assert capsys.readouterr().out == "hi\\n"
        def test_capfd(capfd):
            import os; os.system("echo hi")
            assert capfd.readouterr().out == "hi\\n"
        def test_caplog(caplog):
            import logging; logging.warning("w")
            assert "w" in caplog.text
        @pytest.mark.filterwarnings("error")
        def test_warning_is_an_error(): warnings.warn("x")
    """)
    assert bench.statuses() == {
        "test_param[1]": "passed",
        "test_param[2]": "failed",
        "test_param[a b]": "passed",
        "TestClass::test_method": "passed",
        "TestUnit::test_unit": "passed",
        "TestUnit::test_unit_fails": "failed",
        "TestUnit::test_unit_skipped": "error",
        "test_monkeypatch": "passed",
        "test_capsys": "passed",
        "test_capfd": "passed",
        "test_caplog": "passed",
        "test_warning_is_an_error": "failed",
    }


def test_a_session_fixture_is_set_up_once_for_all_tests(bench):
    bench.test_file("""
        import pytest
        from pathlib import Path
        @pytest.fixture(scope="session")
        def built():
            with open(f"{APP}/log", "a") as log: log.write("x")
        def test_a(built): pass
        def test_b(built): pass
    """)
    assert set(bench.statuses().values()) == {"passed"}
    assert (bench.app / "log").read_text() == "x"


def test_files_are_looked_at_anew_in_each_run(bench):
    bench.test_file("from pathlib import Path\nTEXT = Path(APP, 'out').read_text()\ndef test_out(): assert TEXT == 'right'\n")
    ids = ["test_outputs.py::test_out"]
    assert bench.statuses(ids=ids) == {"test_out": "error"}
    (bench.app / "out").write_text("wrong")
    assert bench.statuses(ids=ids) == {"test_out": "failed"}
    (bench.app / "out").write_text("right")
    assert bench.statuses(ids=ids) == {"test_out": "passed"}


def test_a_file_that_does_not_import_costs_its_own_ids_only(bench):
    bench.test_file("def test_fine(): pass", "test_a.py")
    bench.test_file("import missing_solution\ndef test_x(): pass", "test_b.py")
    report = bench.run(ids=["test_a.py::test_fine", "test_b.py::test_x", "test_b.py::test_y"])
    assert [outcome[0] for outcome in report["outcomes"].values()] == ["passed", "error", "error"]
    assert "missing_solution" in report["outcomes"]["test_b.py::test_x"][2]
    assert bench.collect()["errors"]


def test_tests_of_the_agents_module_are_listed_behind_the_oracle(bench, zygote):
    bench.test_file("import sys; sys.path.insert(0, APP)\nimport solution\ndef test_x(): assert solution.ready\n")
    (bench.tests.parent / "solve.sh").write_text('echo "ready = $READY" > solution.py; exit 3\n')
    payload = {"tests_dir": str(bench.tests), "workdir": str(bench.app), "timeout_s": 20, "solution_env": {"READY": "True"}}
    assert bench.collect()["errors"]
    listing = zygote("collect_solved", {**payload, "solution": str(bench.tests.parent / "solve.sh")})
    assert listing == {"ids": ["test_outputs.py::test_x"], "errors": []}
    (bench.tests.parent / "solve.sh").write_text("sleep 60\n")
    listing = zygote("collect_solved", {**payload, "timeout_s": 0.5, "solution": str(bench.tests.parent / "solve.sh")})
    assert "did not end" in listing["errors"][0]


@pytest.mark.parametrize("source", ["def broken(:", "import os; os._exit(0)", "raise SystemExit(0)", "import pytest; pytest.exit('x')"])
def test_a_module_that_ends_collection_is_an_error_not_a_pass(bench, source):
    bench.test_file(f"{source}\ndef test_x(): pass")
    assert bench.statuses(ids=["test_outputs.py::test_x"]) == {"test_x": "error"}
    listing = bench.collect()
    assert listing["ids"] == []
    assert listing["errors"]


def test_a_broken_conftest_is_an_error(bench):
    (bench.tests / "conftest.py").write_text("raise ValueError('broken conftest')\n")
    bench.test_file("def test_x(): pass")
    report = bench.run(ids=["test_outputs.py::test_x"])
    assert report["outcomes"]["test_outputs.py::test_x"][0] == "error"
    assert "broken conftest" in report["outcomes"]["test_outputs.py::test_x"][2]


@pytest.mark.parametrize(
    "source",
    [
        "def test_a(): pass\ndef test_b(): assert 0\nclass TestC:\n    def test_d(self): pass\n",
        "import pytest\n@pytest.mark.parametrize('x', ['a b', 2])\ndef test_p(x): assert x == 2\ndef test_skip(): pytest.skip('no')\n",
        "import os\ndef test_a(): pass\ndef test_exit(): os._exit(0)\ndef test_b(): pass\n",
        "import ctypes\ndef test_only(): ctypes.string_at(0)\n",
        "import time\ndef test_hang(): time.sleep(60)\ndef test_b(): pass\n",
        "import pytest\ndef test_exit(): pytest.exit('x')\ndef test_b(): pass\n",
        # A second runner cannot import it: an error of the run, not of the list.
        "import os\nos.mkdir(APP + '/once')\ndef test_exit(): os._exit(0)\ndef test_b(): pass\n",
    ],
)
def test_collecting_and_running_in_one_go_says_the_same(bench, source):
    bench.test_file(source)
    ids = bench.collect()["ids"]
    for path in bench.app.iterdir():
        path.rmdir()
    two = bench.run(ids=ids, test_timeout_s=0.7)
    for path in bench.app.iterdir():
        path.rmdir()
    one = bench.collect_and_run(test_timeout_s=0.7)
    assert one["ids"] == ids
    assert {name: status for name, (status, _, _) in one["outcomes"].items()} == {
        name: status for name, (status, _, _) in two["outcomes"].items()
    }
    assert (one["unknown"], one["runners"]) == (two["unknown"], two["runners"])


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n",
        "def broken(:\n",
        "import no_such_module\ndef test_a(): pass\n",
        "import os\nos._exit(0)\ndef test_a(): pass\n",
        "import pytest\npytest.skip('all of it', allow_module_level=True)\ndef test_a(): pass\n",
    ],
)
def test_a_list_that_cannot_be_frozen_is_not_run(bench, source):
    bench.test_file(source)
    assert bench.collect_and_run() == {**bench.collect(), "outcomes": None}


def test_a_list_with_an_id_twice_is_not_run(bench):
    (bench.tests / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_pycollect_makeitem(collector, name, obj):\n"
        "    if name == 'test_twice': return [pytest.Function.from_parent(collector, name=name) for _ in range(2)]\n"
    )
    bench.test_file("def test_twice(): pass\n")
    assert bench.collect_and_run() == {"ids": ["test_outputs.py::test_twice"] * 2, "errors": [], "outcomes": None}


def test_collecting_that_takes_longer_than_a_run_may_is_no_run(bench):
    bench.test_file("import time\ntime.sleep(0.6)\ndef test_a(): pass\n")
    assert bench.collect_and_run(test_timeout_s=0.2) == {"ids": ["test_outputs.py::test_a"], "errors": [], "outcomes": None}
    assert bench.collect_and_run(test_timeout_s=5)["outcomes"]["test_outputs.py::test_a"][0] == "passed"


def test_collecting_and_running_have_the_whole_limit_each(bench):
    bench.test_file("import time\ntime.sleep(0.7)\ndef test_a(): time.sleep(0.7)\n")
    assert bench.collect_and_run(timeout_s=1.2)["outcomes"]["test_outputs.py::test_a"][0] == "passed"


def test_unknown_missing_and_duplicated_ids(bench):
    (bench.tests / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_pycollect_makeitem(collector, name, obj):\n"
        "    if name == 'test_twice': return [pytest.Function.from_parent(collector, name=name) for _ in range(2)]\n"
    )
    bench.test_file("def test_twice(): pass\ndef test_new(): pass\n")
    report = bench.run(ids=["test_outputs.py::test_gone", "test_outputs.py::test_twice"])
    assert {name: outcome[0] for name, outcome in report["outcomes"].items()} == {
        "test_outputs.py::test_gone": "missing",
        "test_outputs.py::test_twice": "error",
    }
    assert report["unknown"] == ["test_outputs.py::test_new"]
    assert bench.collect()["ids"].count("test_outputs.py::test_twice") == 2


def test_a_hang_costs_one_verdict(bench):
    bench.test_file("""
        import os, signal, time
        def test_before(): pass
        def test_hang():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        def test_after(): pass
    """)
    report = bench.run(test_timeout_s=0.5)
    assert [outcome[0] for outcome in report["outcomes"].values()] == ["passed", "error", "passed"]
    assert "ran out of time" in report["outcomes"]["test_outputs.py::test_hang"][2]
    assert report["runners"] == 2


def test_the_total_limit_ends_a_run(bench):
    bench.test_file("import time, pytest\n@pytest.mark.parametrize('n', range(50))\ndef test_slow(n): time.sleep(0.3)\n")
    statuses = list(bench.statuses(timeout_s=1.0).values())
    assert statuses[0] == "passed"
    assert statuses[-1] == "error"


def test_a_hang_at_import_is_an_error(bench):
    bench.test_file("import time\ntime.sleep(60)\ndef test_x(): pass")
    assert bench.statuses(ids=["test_outputs.py::test_x"], test_timeout_s=0.5) == {"test_x": "error"}


@pytest.mark.parametrize("exit_code", [0, 1])
def test_os_exit_is_not_a_pass(bench, exit_code):
    bench.test_file(f"import os\ndef test_a(): pass\ndef test_exit(): os._exit({exit_code})\ndef test_b(): pass\n")
    assert bench.statuses() == {"test_a": "passed", "test_exit": "error", "test_b": "passed"}


def test_a_crash_costs_one_verdict(bench):
    bench.test_file("import ctypes\ndef test_segv(): ctypes.string_at(0)\ndef test_b(): pass\n")
    assert bench.statuses() == {"test_segv": "error", "test_b": "passed"}


def test_a_fork_that_runs_on_cannot_vote(bench):
    bench.test_file("""
        import os, time
        def test_fork():
            if os.fork():
                time.sleep(0.3)
                assert 0
        def test_b(): pass
    """)
    assert bench.statuses() == {"test_fork": "failed", "test_b": "passed"}


def test_fifo_and_dev_zero_where_a_deliverable_belongs(bench):
    os.mkfifo(bench.app / "fifo")
    (bench.app / "zero").symlink_to("/dev/zero")
    bench.test_file("""
        from pathlib import Path
        def test_fifo(): assert Path(APP, "fifo").read_text() == ""
        def test_zero(): assert Path(APP, "zero").read_bytes()[:1] == b"x"
        def test_fine(): pass
    """)
    statuses = bench.statuses(test_timeout_s=2.0, memory_mb=256)
    assert statuses["test_fifo"] == "error"
    assert statuses["test_zero"] in ("failed", "error")
    assert statuses["test_fine"] == "passed"


def test_output_is_dropped_and_cannot_forge_a_verdict(bench):
    bench.test_file("""
        import json, os, sys, subprocess
        VERDICT = {"kind": "verdict", "id": "test_outputs.py::test_forger", "status": "passed", "seconds": 0, "message": ""}
        RECORD = json.dumps(VERDICT) + "\\n"
        def test_huge():
            for _ in range(64): sys.stdout.write("x" * (1 << 20))
            subprocess.run(["sh", "-c", "head -c 10000000 /dev/zero; head -c 10000000 /dev/zero >&2"], check=True)
        def test_forger():
            print(RECORD, RECORD.replace("}", ', "nonce": ""}'))
            for fd in range(3, 64):
                try: os.write(fd, (RECORD + RECORD.replace("}", ', "nonce": "0"}') + "[]\\nnull\\n").encode())
                except OSError: pass
            assert 0
    """)
    assert bench.statuses() == {"test_huge": "passed", "test_forger": "failed"}


def test_flooding_the_pipe_ends_the_test(bench):
    bench.test_file("""
        import os, fcntl
        def test_flood():
            pipes = [int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
                     and os.readlink(f"/proc/self/fd/{n}").startswith("pipe:")]
            while True:
                for fd in pipes:
                    try: os.write(fd, b"x" * 65536)
                    except OSError: pass
        def test_b(): pass
    """)
    assert bench.statuses() == {"test_flood": "error", "test_b": "passed"}


def test_children_of_a_test_do_not_inherit_the_pipe(bench):
    bench.test_file("""
        import os, subprocess
        def test_fds():
            out = subprocess.run(["sh", "-c", "ls -l /proc/self/fd | grep -c pipe:"], stdout=open(APP + "/out", "w"), close_fds=False)
            assert open(APP + "/out").read().strip() == "1"  # grep's own stdin
    """)
    assert bench.statuses() == {"test_fds": "passed"}


def test_nothing_of_the_agents_tree_configures_the_run(bench):
    for directory in (bench.app, bench.tests.parent):
        (directory / "conftest.py").write_text("import pytest\ndef pytest_runtest_setup(item): pytest.skip('agent')\n")
        (directory / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = none.py\n")
        (directory / "sitecustomize.py").write_text("raise SystemExit('sitecustomize')\n")
        (directory / "colorsys.py").write_text("raise SystemExit('shadowed')\n")
    bench.test_file("""
        import os, sys, colorsys
        def test_environment():
            mine = {name for name in os.environ if not name.startswith("PYTEST_")}
            assert mine == {"HOME", "LANG", "PATH", "TERM", "EXTRA"} and "PYTEST_ADDOPTS" not in os.environ
            assert os.getcwd() == APP
            assert APP not in sys.path and "" not in sys.path and os.path.dirname(APP) not in sys.path
        def test_stdin(): assert sys.stdin.buffer.raw.read() == b"" if hasattr(sys.stdin, "buffer") else os.read(0, 1) == b""
    """)
    assert bench.statuses(env={"EXTRA": "1"}) == {"test_environment": "passed", "test_stdin": "passed"}


def test_a_missing_working_directory_is_the_tests_problem(bench):
    bench.test_file("import os\ndef test_cwd(): assert os.getcwd() == '/'\n")
    assert bench.statuses(workdir="/no/such/directory") == {"test_cwd": "passed"}


def test_no_bytecode_is_written(bench):
    bench.test_file("def test_x(): pass\n")
    bench.run()
    assert not list(bench.tests.rglob("__pycache__"))


def test_failing_subtests_do_not_pass(bench):
    bench.test_file("""
        import unittest
        class TestUnit(unittest.TestCase):
            def test_sub(self):
                for n in range(2):
                    with self.subTest(n=n): self.assertEqual(n, 0)
    """)
    assert bench.statuses() != {"TestUnit::test_sub": "passed"}


def test_messages_name_the_line_and_are_short(bench):
    bench.test_file("def test_x():\n    raise ValueError('y' * 5000)\n")
    (outcome,) = bench.run()["outcomes"].values()
    assert outcome[2].startswith("test_outputs.py:3: ValueError: yyy")
    assert len(outcome[2]) <= 300
