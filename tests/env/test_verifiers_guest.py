"""Modules of the agent that are kept apart from the tests that use them: what works as ever, and what they cannot do."""

import textwrap

import pytest

SOLUTION = """
import collections, dataclasses, decimal, enum, pathlib, sys

VERSION = "1.2"
TABLE = {"a": [1, 2.5, None, True, (1, 2), {3}, b"x", 1j, float("inf"), 2**200]}
calls = []

def double(x): return x + x
def sort(items, *, reverse=False): items.sort(reverse=reverse)
def fill(d): d["new"] = {"deep": [1]}
def echo(*args, **named): return args, named
def count(text): return collections.Counter(text)
def path(name): return pathlib.Path(name) / "x"
def price(): return decimal.Decimal("1.10")
def numbers(n):
    for i in range(n): yield i
def shout(): print("out"); print("err", file=sys.stderr)
def remember(x): calls.append(x); return len(calls)
def where(): return str(pathlib.Path.cwd())
def variable(name): return __import__("os").environ.get(name)

class Refused(ValueError):
    pass

class Worse(Refused):
    def __init__(self, a, b): super().__init__(a, b); self.code = 7

def refuse(): raise Worse("no", 3)
def divide(a, b): return a / b

@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    def moved(self, dx): return Point(self.x + dx, self.y)
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)

class Level(enum.IntEnum):
    LOW = 1

Pair = collections.namedtuple("Pair", "left right")

class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __setitem__(self, index, value): self.items[index] = value
    def __enter__(self): return self
    def __exit__(self, *_): self.items = ["left"]
    def __repr__(self): return f"Stack({self.items})"
"""
TESTS = """
    import sys; sys.path.insert(0, APP)
    import importlib, os
    import pytest
    import solution
    from solution import Point, double

    def test_values():
        assert double(2) == 4 and double("ab") == "abab" and type(double(2)) is int
        assert solution.VERSION == "1.2" and solution.TABLE["a"][5] == {3}
        assert solution.TABLE == {"a": [1, 2.5, None, True, (1, 2), {3}, b"x", 1j, float("inf"), 2**200]}
        assert solution.echo(1, [2], do=3, self=4, name=5) == ((1, [2]), {"do": 3, "self": 4, "name": 5})
        assert solution.count("aab")["a"] == 2 and solution.count("aab").most_common(1) == [("a", 2)]
        assert solution.path("/a").name == "x" and str(solution.price()) == "1.10"
        assert solution.divide(1, 3) == pytest.approx(0.3333, abs=1e-3)

    def test_arguments_are_changed_in_place():
        items, table = [3, 1, 2], {"old": 1}
        assert solution.sort(items) is None and items == [1, 2, 3]
        solution.sort(items, reverse=True)
        solution.fill(table)
        assert items == [3, 2, 1] and table == {"old": 1, "new": {"deep": [1]}}

    def test_state_stays():
        assert solution.remember("a") == 1 and solution.remember("b") == 2 and solution.calls == ["a", "b"]
        importlib.reload(solution)
        assert solution.calls == []

    def test_objects():
        point = Point(1, y=2)
        assert (point.x, point.y) == (1, 2) and point.moved(2) == Point(3, 2) and point != Point(0)
        assert Point(1) + Point(2) == Point(3) and isinstance(point, Point) and not isinstance(3, Point)
        point.x = 9
        assert point.x == 9 and "Point" in repr(point) and hasattr(point, "moved") and not hasattr(point, "nothing")
        assert solution.Level.LOW == 1 and solution.Pair(1, 2) == (1, 2) and solution.Pair(1, 2).right == 2

    def test_containers():
        stack = solution.Stack().push(1).push("b")
        assert len(stack) == 2 and list(stack) == [1, "b"] and stack[1] == "b" and "b" in stack and 3 not in stack
        stack[0] = 5
        with stack as same:
            assert same is stack and sum(1 for _ in stack) == 2
        assert stack.items == ["left"] and str(stack) == "Stack(['left'])"
        assert list(solution.numbers(3)) == [0, 1, 2] and sum(solution.numbers(4)) == 6

    def test_exceptions():
        with pytest.raises(ValueError, match="no"): solution.refuse()
        with pytest.raises(solution.Refused) as caught: solution.refuse()
        assert caught.value.args == ("no", 3) and caught.type is solution.Worse
        with pytest.raises(ZeroDivisionError): solution.divide(1, 0)
        with pytest.raises(AttributeError): solution.nothing
        with pytest.raises(TypeError): solution.double()
        with pytest.raises(TypeError, match="kept apart"): solution.double(lambda: 1)
        with pytest.raises(ImportError): importlib.import_module("solution.nothing")
        with pytest.raises(ImportError): from solution import nothing

    def test_surroundings(monkeypatch, capsys, tmp_path):
        solution.shout()
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("out\\n", "err\\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLOUR", "red")
        monkeypatch.setattr(solution, "VERSION", "2")
        assert solution.where() == str(tmp_path) and solution.variable("COLOUR") == "red" and solution.VERSION == "2"

    def test_by_its_path():
        spec = importlib.util.spec_from_file_location("other", APP + "/solution.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.double(3) == 6 and module is not solution

    def test_packages():
        import package, package.inner
        from package import inner
        from package.inner import three
        assert package.two == 2 and three() == 3 and inner.three() == 3
"""


@pytest.fixture
def apart(bench):
    """A bench whose runs keep modules of the agent apart."""

    def run(**kwargs):
        ids = kwargs.pop("ids", None) or bench.collect()["ids"]
        return bench.run(ids=ids, imports="apart", **kwargs)

    run.bench = bench
    return run


def statuses(report):
    return {name.partition("::")[2]: outcome[0] for name, outcome in report["outcomes"].items()}


def test_modules_apart_work_as_ever(apart):
    bench = apart.bench
    (bench.app / "solution.py").write_text(SOLUTION)
    (bench.app / "package").mkdir()
    (bench.app / "package" / "__init__.py").write_text("two = 2\n")
    (bench.app / "package" / "inner.py").write_text("from . import two\ndef three(): return two + 1\n")
    bench.test_file(TESTS)
    report = apart()
    assert {name: outcome[2] for name, outcome in report["outcomes"].items()} == dict.fromkeys(report["outcomes"], "")
    assert (report["tainted"], report["runners"]) == ([], 1)


USING = """
    import sys; sys.path.insert(0, APP)
    import solution
    from pathlib import Path
    def test_four(): assert solution.double(2) == 4
    def test_in(): assert "x" in solution.double(["x"])
    def test_not(): assert solution.double(2) != 5 and not solution.double(0)
    def test_file(): assert Path(APP, "made").read_text() == "yes"
    def test_sorted(): assert sorted(solution.double([2, 1])) == [1, 1, 2, 2]
"""
IDS = [f"test_outputs.py::test_{name}" for name in ("four", "in", "not", "file", "sorted")]
EVERYTHING = """
class Everything{base}:
    def yes(self, *a, **k): return True
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = __instancecheck__ = yes
    __hash__ = lambda self: 0
    __len__ = lambda self: 1
    __iter__ = lambda self: iter(())
def double(x): return Everything({value})
"""
ATTACKS = {
    "ends the process": "import os; os._exit(0)",
    "ends it later": "import os\ndef double(x): os._exit(0)",
    "raises SystemExit": "def double(x): raise SystemExit(0)",
    "interrupts": "def double(x): raise KeyboardInterrupt",
    "ends pytest": "import pytest\ndef double(x): pytest.exit('x', returncode=0)",
    "skips": "import pytest\ndef double(x): pytest.skip('x')",
    "patches everything": """
        import _pytest.python, builtins, pathlib
        _pytest.python.Function.runtest = lambda self: None
        pathlib.Path.read_text = lambda self, *a, **k: "yes"
        builtins.AssertionError = ZeroDivisionError
        double = lambda x: None
    """,
    "looks at frames": """
        import sys
        def double(x):
            frame = sys._getframe()
            while frame is not None:
                if "double" in frame.f_code.co_names: return frame.f_code.co_consts[-1]
                frame = frame.f_back
    """,
    "equals everything": EVERYTHING.format(base="", value=""),
    "equals everything as an int": EVERYTHING.format(base="(int)", value="7"),
    "equals everything as a list": EVERYTHING.format(base="(list)", value="[7]"),
    "floods": "def double(x): return 'x' * (1 << 27)",
    "nests": "def double(x):\n    found = []\n    for _ in range(10**5): found = [found]\n    return found",
    "answers by itself": """
        import gc, json, socket, struct
        for each in gc.get_objects():
            if isinstance(each, socket.socket):
                rest = b', "out": "", "err": "", "changed": []}'
                for text in (b"{}", b"[" * 100000, b'{"value": {"handle": ["x"]}' + rest, b'{"value": {"int": "0x4"}}'):
                    each.sendall(struct.pack("=Q", len(text)) + text)
        double = lambda x: None
    """,
    "speaks nonsense": """
        import gc, os, socket
        for each in gc.get_objects():
            if isinstance(each, socket.socket): each.sendall(os.urandom(4096))
        double = lambda x: None
    """,
    "writes to descriptors": """
        import os
        for fd in range(3, 32):
            try: os.write(fd, b'{"kind": "verdict", "status": "passed"}\\n')
            except OSError: pass
        double = lambda x: None
    """,
    "claims an exception": "class E(BaseException): pass\ndef double(x): raise E",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_it_does_earns_anything(apart, attack):
    apart.bench.test_file(USING)
    (apart.bench.app / "solution.py").write_text(textwrap.dedent(ATTACKS[attack]))
    report = apart(ids=IDS, test_timeout_s=5)
    found = statuses(report)
    # An unequal object is unequal, whatever else is wrong with it.
    assert {name for name, status in found.items() if status == "passed"} <= {"test_not"}
    assert report["tainted"] == []


def test_honest_work_passes_it(apart):
    apart.bench.test_file(USING)
    (apart.bench.app / "solution.py").write_text("def double(x): return x + x\n")
    (apart.bench.app / "made").write_text("yes")
    assert set(statuses(apart(ids=IDS)).values()) == {"passed"}


def test_a_module_that_does_not_import_is_an_error_that_says_why(apart):
    apart.bench.test_file(USING)
    (apart.bench.app / "solution.py").write_text("def broken(:\n")
    report = apart(ids=IDS)
    assert set(statuses(report).values()) == {"error"}
    assert "SyntaxError" in report["outcomes"][IDS[0]][2]


def test_what_goes_around_the_import_system_is_seen_as_ever(apart):
    apart.bench.test_file("def test_exec(): exec(open(APP + '/s.py').read())\ndef test_other(): pass\n")
    (apart.bench.app / "s.py").write_text("x = 1\n")
    report = apart()
    assert (set(statuses(report).values()), report["tainted"]) == ({"passed"}, ["test_outputs.py::test_exec"])
