"""What a verifier needs: declared by the task, or read off the source of its tests."""

import os
import textwrap

import pytest

from t1_env.errors import TaskError
from t1_env.tasks.schema import T1Metadata, TaskConfig, parse_task_toml
from t1_env.tasks.task import Task
from t1_env.verifiers.classes import classes_of, needs_live_processes


def task_with(tmp_path, metadata=None, **files):
    for name, text in files.items():
        path = tmp_path / "tests" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return Task("x", tmp_path, "do", TaskConfig(), metadata or T1Metadata(), digest=os.fspath(tmp_path), workdir="/app")


def inferred(tmp_path, source, *names, **files):
    task = task_with(tmp_path, test_a=source, **files)
    return [kind for kind in classes_of(task, [f"test_a.py::{name}" for name in names]).values()]


def test_what_a_test_does_says_what_it_needs(tmp_path):
    source = """
        import os, socket, subprocess
        import urllib.request as ask
        from subprocess import run as start
        URL = "http://localhost:8080/"
        def helper(): return subprocess.run(["x"])
        def fetch(url): return ask.urlopen(url).read()
        class Client:
            def get(self): return socket.create_connection(("127.0.0.1", 80))
        def test_reads(): assert open("/app/x").read() == "x"
        def test_starts(): start(["/app/x"])
        def test_starts_in_a_helper(): assert helper()
        def test_shell(): os.system("make")
        def test_asks(): assert fetch(URL) == b"x"
        def test_asks_by_class(): Client().get()
        def test_asks_by_program(): subprocess.run("curl -s http://127.0.0.1:80/ | grep x", shell=True)
        def test_asks_a_server_of_its_own():
            server = subprocess.Popen(["/app/server"])
            assert fetch(URL)
        def test_asks_elsewhere(): ask.urlopen("http://example.org")
        def test_names_a_client(): assert "curl http://localhost" in open("/app/x").read()
    """
    names = {
        "test_reads": "pure",
        "test_starts": "exec",
        "test_starts_in_a_helper": "exec",
        "test_shell": "exec",
        "test_asks": "service",
        "test_asks_by_class": "service",
        "test_asks_by_program": "service",
        "test_asks_a_server_of_its_own": "exec",
        "test_asks_elsewhere": "pure",
        "test_names_a_client": "pure",
    }
    assert inferred(tmp_path, source, *names) == list(names.values())


def test_fixtures_classes_and_parameters_count(tmp_path):
    source = """
        import subprocess, pytest
        @pytest.fixture
        def built(): subprocess.run(["make"])
        def test_uses(built): pass
        @pytest.mark.usefixtures("built")
        def test_marked(): pass
        @pytest.mark.parametrize("x", [1, 2])
        def test_plain(x): pass
        class TestC:
            def setup_method(self): self.out = subprocess.check_output("x")
            def test_method(self): pass
            def test_other(self, far): pass
    """
    conftest = """
        import http.client, pytest
        @pytest.fixture
        def far(): return http.client.HTTPConnection("localhost", 80)
    """
    names = ("test_uses", "test_marked", "test_plain[1]", "TestC::test_method", "TestC::test_other")
    assert inferred(tmp_path, source, *names, conftest=conftest) == ["exec", "exec", "pure", "exec", "service"]


def test_a_fixture_that_all_tests_use(tmp_path):
    conftest = "import subprocess, pytest\n@pytest.fixture(autouse=True)\ndef go(): subprocess.run(['x'])\n"
    assert inferred(tmp_path, "def test_x(): pass\n", "test_x", conftest=conftest) == ["exec"]


def test_what_cannot_be_read_may_do_anything(tmp_path):
    task = task_with(tmp_path, test_a="def broken(:\n", sub__test_b="import os\ndef test_x(): os.system('x')\n")
    assert classes_of(task, ("test_a.py::test_x", "speed", "sub/test_b.py::test_x")) == {
        "test_a.py::test_x": "exec",
        "speed": "exec",
        "sub/test_b.py::test_x": "exec",
    }


def test_the_task_has_the_last_word(tmp_path):
    source = "def test_a(): pass\ndef test_b(): pass\n@pytest.mark.parametrize('x', [1, 2])\ndef test_c(x): pass\n"
    declared = {"test_a.py::test_a": "service", "test_a.py::test_c": "exec", "test_a.py::test_c[2]": "service"}
    task = task_with(tmp_path, T1Metadata(classes=declared), test_a=source)
    ids = ("test_a.py::test_a", "test_a.py::test_b", "test_a.py::test_c[1]", "test_a.py::test_c[2]")
    assert list(classes_of(task, ids).values()) == ["service", "pure", "exec", "service"]
    assert needs_live_processes(task, ids)
    assert not needs_live_processes(task, ids[1:3])
    assert set(classes_of(task_with(tmp_path, T1Metadata(classes="service")), ids).values()) == {"service"}


@pytest.mark.parametrize("text", ['classes = "fast"', 'classes = {"a::b" = "fast"}', 'writable = ["usr/bin"]'])
def test_a_wrong_declaration_is_named(text):
    with pytest.raises(TaskError, match=r"metadata\.t1"):
        parse_task_toml(f"[metadata.t1]\n{text}\n", file="task.toml")


def test_declarations_in_a_task_toml():
    text = '[metadata.t1]\nwritable = ["/usr/local/bin"]\n[metadata.t1.classes]\n"test_a.py::test_x" = "service"\n'
    metadata = parse_task_toml(text, file="task.toml")[1]
    assert (metadata.writable, metadata.classes) == (("/usr/local/bin",), {"test_a.py::test_x": "service"})
