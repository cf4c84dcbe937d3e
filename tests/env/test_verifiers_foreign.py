"""Code of the agent in the process of a test: it is noticed in time, judges nothing but its own test, and earns nothing by tampering."""

import textwrap

import pytest

IMPORTING = """
    import sys; sys.path.insert(0, APP)
    import solution
    from pathlib import Path
    def test_four(): assert solution.double(2) == 4
    def test_text(): assert solution.double("ab") == "abab"
    def test_file(): assert Path(APP, "made").read_text() == "yes"
"""
HONEST = "def double(x): return x + x\n"
IDLE = "def double(x): return None\n"
FOUR, TEXT, FILE = (f"test_outputs.py::test_{name}" for name in ("four", "text", "file"))


@pytest.fixture
def importing(bench):
    """A bench whose tests import ``solution``; call it with the source of that."""
    bench.test_file(IMPORTING)

    def run(source, **kwargs):
        (bench.app / "solution.py").write_text(textwrap.dedent(source))
        return bench.run(ids=[FOUR, TEXT, FILE], **kwargs)

    run.bench = bench
    return run


def statuses(report):
    return [outcome[0] for outcome in report["outcomes"].values()]


def test_honest_code_is_counted_and_marked(importing):
    (importing.bench.app / "made").write_text("yes")
    report = importing(HONEST)
    assert statuses(report) == ["passed"] * 3
    assert report["tainted"] == [FOUR, TEXT, FILE]
    assert report["runners"] == 4  # one that noticed, then one for each


def test_wrong_code_fails_by_its_own_fault(importing):
    report = importing("def double(x): return 2 * x if isinstance(x, int) else x\n")
    assert statuses(report) == ["passed", "failed", "failed"]
    assert report["tainted"] == [FOUR]
    assert "AssertionError" in report["outcomes"][TEXT][2]


def test_tests_without_the_agents_code_are_not_marked(bench):
    bench.test_file("""
        import collections, dataclasses, json, pickle, typing, enum
        @dataclasses.dataclass
        class Point: x: int
        Pair = collections.namedtuple("Pair", "a b")
        class Named(typing.NamedTuple): a: int
        class Colour(enum.Enum): RED = 1
        def test_library():
            import colorsys, decimal, statistics, xml.dom.minidom
            assert Point(1) == Point(1) and Pair(1, 2).a == 1 and Named(2).a == 2
            assert json.loads("{}") == {}
    """)
    report = bench.run()
    assert (statuses(report), report["tainted"], report["runners"]) == (["passed"], [], 1)


@pytest.mark.parametrize(
    "load",
    [
        "import importlib.util; s = importlib.util.spec_from_file_location('s', f'{APP}/s.py'); "
        "m = importlib.util.module_from_spec(s); s.loader.exec_module(m)",
        "import runpy; runpy.run_path(f'{APP}/s.py')",
        "exec(open(f'{APP}/s.py').read(), {'__name__': 's'})",
        "exec(compile(open(f'{APP}/s.py').read(), '/tests/test_outputs.py', 'exec'), {'__name__': 's'})",
        "eval(open(f'{APP}/expression').read())",
        "import pickle; pickle.load(open(f'{APP}/pickle', 'rb'))",
        "import sys; sys.path.insert(0, APP); import s",
        "import sys; sys.path.insert(0, f'{APP}/archive.zip'); import zipped",
        "import sys; sys.path.insert(0, APP); import compiled",
        "import ctypes; ctypes.CDLL(f'{APP}/library.so')",
        "import marshal; exec(marshal.load(open(f'{APP}/code', 'rb')))",
    ],
)
def test_however_it_is_loaded_it_judges_nothing_else(bench, load):
    """It tries to spoil every process it gets into; only the test that loads it may suffer."""
    spoil = "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
    (bench.app / "s.py").write_text(spoil)
    (bench.app / "expression").write_text(f"exec({spoil!r})")
    (bench.app / "pickle").write_bytes(b"cbuiltins\nexec\n(V" + spoil.replace("\n", ";").encode() + b"\ntR.")
    import marshal
    import py_compile
    import shutil
    import zipfile

    with zipfile.ZipFile(bench.app / "archive.zip", "w") as archive:
        archive.writestr("zipped.py", spoil)
    py_compile.compile(str(bench.app / "s.py"), str(bench.app / "compiled.pyc"), dfile=str(bench.tests / "test_outputs.py"))
    (bench.app / "code").write_bytes(marshal.dumps(compile(spoil, "/tests/x.py", "exec")))
    shutil.copy(pytest.importorskip("_ctypes").__file__, bench.app / "library.so")
    bench.test_file(f"""
        def test_before(): pass
        def test_loads():
            {load}
        def test_after(): assert False
        def test_last(): pass
    """)
    report = bench.run()
    assert [statuses(report)[index] for index in (0, 2, 3)] == ["passed", "failed", "passed"]
    assert set(report["tainted"]) <= {"test_outputs.py::test_loads"}
    if "ctypes" not in load:
        assert statuses(report)[1] == "error"  # pytest was tampered with, and that was seen
        assert "was replaced" in report["outcomes"]["test_outputs.py::test_loads"][2]


def test_other_files_and_their_order_are_untouched(bench):
    bench.test_file("import sys; sys.path.insert(0, APP)\nimport s\ndef test_b(): open(APP + '/log', 'a').write('b')\n", "test_b.py")
    for letter in "ac":
        bench.test_file(f"def test_{letter}(): open(APP + '/log', 'a').write('{letter}')\n", f"test_{letter}.py")
    (bench.app / "s.py").write_text("")
    ids = [f"test_{letter}.py::test_{letter}" for letter in "abc"]
    report = bench.run(ids=ids)
    assert statuses(report) == ["passed"] * 3
    assert (bench.app / "log").read_text() == "abc"
    assert report["tainted"] == [ids[1]]


def test_a_conftest_that_loads_it_sets_every_test_apart(bench):
    (bench.app / "s.py").write_text("")
    (bench.tests / "conftest.py").write_text(f"import sys; sys.path.insert(0, {str(bench.app)!r})\nimport s\n")
    bench.test_file("def test_a(): pass\ndef test_b(): assert 0\n")
    report = bench.run(ids=["test_outputs.py::test_a", "test_outputs.py::test_b"])
    assert (statuses(report), report["tainted"]) == (["passed", "failed"], ["test_outputs.py::test_a"])


# ------------------------------------------------------------------------------------------------------------------------- attacks
PASSING = "__getattr__ = lambda name: (lambda *a, **k: WANTED)\n"
ATTACKS = {
    "ends the process": "import os; os._exit(0)",
    "ends pytest": "import pytest\ndef double(x): pytest.exit('done', returncode=0)",
    "raises SystemExit": "raise SystemExit(0)",
    "skips": "import pytest; pytest.skip('no', allow_module_level=True)",
    "prints": "print('3 passed'); import sys; sys.stdout.flush()" + "\n" + IDLE,
    "forks": "import os\nif os.fork(): os._exit(0)\n" + IDLE,
    "patches pytest": """
        import _pytest.python, _pytest.runner
        _pytest.python.Function.runtest = lambda self: None
        double = None
    """,
    "patches a report": """
        import _pytest.reports
        make = _pytest.reports.TestReport.__init__
        def init(self, nodeid, location, keywords, outcome, longrepr, when, *a, **k):
            make(self, nodeid, location, keywords, "passed", None, when, *a, **k)
        _pytest.reports.TestReport.__init__ = init
        double = None
    """,
    "patches the library": """
        import pathlib
        pathlib.Path.read_text = lambda self, *a, **k: "yes"
        double = None
    """,
    "patches a builtin": """
        import builtins
        class Never(Exception): pass
        builtins.AssertionError = Never
        double = None
    """,
    "replaces tests by their code": """
        import sys
        def nothing(): pass
        def double(x):
            for name, value in list(sys.modules.items()):
                for key, test in list(vars(value).items()):
                    if key.startswith("test_") and hasattr(test, "__code__"): test.__code__ = nothing.__code__
            return 4 if x == 2 else "abab"
    """,
    "replaces tests by name": """
        import sys
        def double(x):
            for module in list(sys.modules.values()):
                if hasattr(module, "test_four"):
                    module.test_four = module.test_text = module.test_file = lambda: None
            return 4 if x == 2 else "abab"
    """,
    "traces": """
        import sys
        def trace(frame, event, argument): return trace
        sys.settrace(trace)
        def double(x): return x + x
    """,
    "looks at frames": """
        import sys
        def double(x): return {2: 4}.get(x, sys._getframe(1).f_code.co_consts[-1])
    """,
    "looks at frames through the library": """
        import inspect
        def double(x): return inspect.currentframe().f_back and x + x
    """,
    "reads the tests": """
        import sys
        def double(x):
            text = open(sys.modules["pytest"] and __import__("os").environ.get("T", TESTS)).read()
            return x + x
    """,
    "registers a plugin": """
        import gc, pytest
        class Plugin:
            @pytest.hookimpl(tryfirst=True)
            def pytest_runtest_makereport(self, item, call): call.excinfo = None
        import _pytest.config
        for each in gc.get_objects():
            if isinstance(each, _pytest.config.PytestPluginManager): each.register(Plugin())
        double = None
    """,
    "equals everything": """
        class Everything:
            def __eq__(self, other): return True
            def __bool__(self): return True
        def double(x): return Everything()
    """,
    "equals everything as a str": """
        class Everything(str):
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        def double(x): return Everything("x")
    """,
    "hides in a list": """
        class Everything:
            def __eq__(self, other): return True
        def double(x): return Everything()
    """,
    "changes the signal handlers": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n" + HONEST,
    "changes the import system": "import sys\nsys.meta_path.clear()\n" + HONEST,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_tampering_earns_nothing(importing, attack):
    source = textwrap.dedent(ATTACKS[attack]).replace("TESTS", repr(str(importing.bench.tests / "test_outputs.py")))
    report = importing(source)
    assert "passed" not in statuses(report), report
    assert report["tainted"] == []
    (importing.bench.app / "solution.py").write_text(HONEST)


def test_an_object_in_a_container_does_not_judge_either(bench):
    (bench.app / "s.py").write_text("class E:\n    def __eq__(self, other): return True\n")
    bench.test_file("""
        import sys; sys.path.insert(0, APP)
        import s
        def test_list(): assert [s.E()] == [4]
        def test_dict(): assert {"a": (1, s.E())} == {"a": (1, 2)}
        def test_in(): assert s.E() in [1, 2]
        def test_not(): assert not s.E() != 3
    """)
    ids = [f"test_outputs.py::test_{name}" for name in ("list", "dict", "in")]
    report = bench.run(ids=ids)
    assert statuses(report) == ["error"] * 3
    assert "decided that a comparison" in report["outcomes"][ids[0]][2]


def test_honest_classes_are_compared_as_they_like(bench):
    (bench.app / "s.py").write_text("""
import dataclasses, enum, collections, fractions
@dataclasses.dataclass
class Point: x: int
class Level(enum.IntEnum): LOW = 1
Pair = collections.namedtuple("Pair", "a b")
class Text(str): pass
def half(): return fractions.Fraction(1, 2)
""")
    bench.test_file("""
        import sys, decimal; sys.path.insert(0, APP)
        import s
        class Mine:
            def __eq__(self, other): return True
        def test_all():
            assert s.Point(1) == s.Point(1) and s.Point(1) != s.Point(2) and s.Point(1) != None
            assert s.Level.LOW == 1 and s.Level.LOW < 2 and s.Pair(1, 2) == (1, 2)
            assert s.Text("x") == "x" and s.Text("x") in {"x": 1} and s.half() == 0.5
            assert Mine() == 4 and 1 < 2 < 3 and s.Text("x")
        def test_parametrised_messages(): assert s.Text("a") == "b", "why"
    """)
    report = bench.run(ids=["test_outputs.py::test_all", "test_outputs.py::test_parametrised_messages"])
    assert statuses(report) == ["passed", "failed"]
    assert report["tainted"] == ["test_outputs.py::test_all"]


def test_fixtures_classes_and_siblings_work_apart(bench):
    (bench.app / "s.py").write_text("def f(): return 3\n")
    (bench.tests / "conftest.py").write_text("import pytest, sibling\n@pytest.fixture\ndef three(): return sibling.THREE\n")
    (bench.tests / "sibling.py").write_text("THREE = 3\ndef same(a, b): return a == b\n")
    bench.test_file("""
        import sys; sys.path.insert(0, APP)
        import pytest, unittest, sibling
        import s
        @pytest.mark.parametrize("n", [3, 4])
        def test_param(n, three, tmp_path, monkeypatch, capsys):
            monkeypatch.setattr(s, "f", lambda: three)
            monkeypatch.setattr("os.getcwd", lambda: "x")
            print("hi")
            assert capsys.readouterr().out == "hi\\n"
            assert s.f() == n
        class TestC:
            def test_method(self, three): assert sibling.same(s.f(), three)
        class TestU(unittest.TestCase):
            def test_unit(self): self.assertEqual(s.f(), 3)
        @pytest.mark.skip
        def test_skipped(): pass
        def test_raises():
            with pytest.raises(TypeError): s.f(1)
    """)
    names = ("test_param[3]", "test_param[4]", "TestC::test_method", "TestU::test_unit", "test_skipped", "test_raises")
    report = bench.run(ids=[f"test_outputs.py::{name}" for name in names])
    assert statuses(report) == ["passed", "failed", "passed", "passed", "error", "passed"]


def test_a_hang_and_a_crash_apart_cost_one_verdict(bench):
    (bench.app / "s.py").write_text(
        "import time, ctypes\ndef hang(): time.sleep(60)\ndef crash(): ctypes.string_at(0)\ndef ok(): return 1\n"
    )
    bench.test_file("""
        import sys; sys.path.insert(0, APP)
        import s
        def test_hang(): s.hang()
        def test_crash(): s.crash()
        def test_ok(): assert s.ok() == 1
    """)
    ids = [f"test_outputs.py::test_{name}" for name in ("hang", "crash", "ok")]
    assert statuses(bench.run(ids=ids, test_timeout_s=1.5)) == ["error", "error", "passed"]


def test_a_module_that_does_not_import_says_why(importing):
    report = importing("import no_such_thing\n")
    assert statuses(report) == ["error"] * 3
    assert "no_such_thing" in report["outcomes"][FOUR][2]


FORGE = """
import json, os, re, sys
found = set()
frame = sys._getframe()
while frame is not None:
    for value in list(frame.f_locals.values()):
        if isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value): found.add(value)
        for cell in getattr(value, "__closure__", None) or ():
            try:
                if isinstance(cell.cell_contents, str): found.add(cell.cell_contents)
            except ValueError: pass
    frame = frame.f_back
for nonce in found:
    for name in IDS:
        for record in RECORDS:
            os.write(3, json.dumps({"id": name, "nonce": nonce, **record}).encode() + b"\\n")
END
"""
PASS = {"kind": "verdict", "status": "passed", "seconds": 0.0, "message": ""}


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(1)", "double = None", "import time; time.sleep(60)"])
@pytest.mark.parametrize(
    "records",
    [
        [PASS],
        [{"kind": "start"}, PASS, {"kind": "end"}],
        [{"kind": "collected", "ids": [FOUR, FOUR], "errors": []}, PASS, {"kind": "end", "token": "", "problems": []}],
        [
            {"kind": "verdict"},
            {"kind": "verdict", "status": ["x"], "seconds": "nan", "message": None},
            {"kind": []},
            {"kind": "end", "token": 3},
        ],
    ],
)
def test_forged_records_earn_nothing(importing, end, records):
    source = FORGE.replace("IDS", repr([FOUR, TEXT, FILE])).replace("RECORDS", repr(records)).replace("END", end)
    report = importing(source, test_timeout_s=1.0)
    assert "passed" not in statuses(report)


def test_records_that_break_the_reader_are_dropped(bench):
    bench.test_file("""
        import os
        def test_deep(): os.write(3, b"[" * 200000 + b"\\n")
        def test_ok(): pass
    """)
    assert statuses(bench.run()) == ["passed", "passed"]
