"""Who decides whether two values are equal? Test files are read so that a comparison says so.

``assert f(2) == 4`` holds for every ``f`` that returns an object whose ``__eq__`` always answers true. Where a test runs beside foreign
code, its comparisons are compiled as calls of `Comparisons.compare`, which does what the operator does and then looks at whose method
answered. Plain values and classes of the library and of the tests decide by themselves; a comparison of a plain value that a foreign class
decided in its own favour is reported.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import Any, Final

_NAME: Final = "@t1_compare"
_TRUE: Final = "@t1_true"
_OPERATORS: Final[dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any], str]]] = {
    ast.Eq: ("==", operator.eq, "__eq__"),
    ast.NotEq: ("!=", operator.ne, "__ne__"),
    ast.Lt: ("<", operator.lt, "__lt__"),
    ast.LtE: ("<=", operator.le, "__le__"),
    ast.Gt: (">", operator.gt, "__gt__"),
    ast.GtE: (">=", operator.ge, "__ge__"),
    ast.In: ("in", lambda left, right: left in right, "__contains__"),
    ast.NotIn: ("not in", lambda left, right: left not in right, "__contains__"),
}
_BY_SIGN: Final = {sign: (function, method) for sign, function, method in _OPERATORS.values()}
_PLAIN_CONTAINERS: Final = (list, tuple, set, frozenset)
_MAX_ELEMENTS: Final = 10_000


class Comparisons:
    """Compares for the tests of one process.

    Args:
        is_known: Whether a class is the library's or the tests' own.
        suspicion: Called with what a foreign class decided.
    """

    def __init__(self, is_known: Callable[[type], bool], suspicion: Callable[[str], None]) -> None:
        self._is_known = is_known
        self._suspicion = suspicion

    def compare(self, left: Any, sign: str, right: Any) -> Any:
        """What ``left <sign> right`` is."""
        function, method = _BY_SIGN[sign]
        result = function(left, right)
        sides = [next(self._deciders(side, method), None) for side in (left, right)]
        decided = next((kind for kind in sides if kind is not None), None)
        # Two foreign objects may be compared as they like; a plain value is not for a foreign class to judge.
        if decided is not None and None in sides and left is not None and right is not None and result:
            self._suspicion(f"{decided.__module__}.{decided.__qualname__} decided that a comparison by {sign} holds")
        return result

    def true(self, value: Any) -> Any:
        """A value that is asserted."""
        for kind in type(value).__mro__:
            if "__bool__" in kind.__dict__:
                if not self._is_known(kind):
                    self._suspicion(f"{kind.__module__}.{kind.__qualname__} decided that an assertion holds")
                break
        return value

    def _deciders(self, value: Any, method: str) -> Iterator[type]:
        """Foreign classes that have a say when ``value``, or an element of it, is compared."""
        methods = {method} if method == "__ne__" else {method, "__eq__"}
        pending, left = [value], _MAX_ELEMENTS
        while pending and left:
            left -= 1
            each = pending.pop()
            kind = type(each)
            if kind is dict:
                pending += [*each, *each.values()]
            elif kind in _PLAIN_CONTAINERS:
                pending += each
            else:
                for base in kind.__mro__:
                    if not methods.isdisjoint(base.__dict__):
                        if not self._is_known(base):
                            yield base
                        break


class TestFiles:
    """Finds the task's test files and imports them with `Comparisons`; a member of ``sys.meta_path``.

    Args:
        tests_dir: Directory of the tests.
        comparisons: What comparisons of theirs call.
    """

    __test__ = False

    def __init__(self, tests_dir: str, comparisons: Comparisons) -> None:
        self._root = f"{tests_dir.rstrip('/')}/"
        self.helpers: Mapping[str, Any] = {_NAME: comparisons.compare, _TRUE: comparisons.true}
        self.imported: list[tuple[ModuleType, CodeType, tuple[str, ...]]] = []

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """The specification of a test file; None for every other module."""
        found = PathFinder.find_spec(name, path)
        if found is None or not isinstance(found.loader, SourceFileLoader) or not (found.origin or "").startswith(self._root):
            return None
        loader = TestFileLoader(name, str(found.origin), self)
        return spec_from_file_location(name, found.origin, loader=loader, submodule_search_locations=found.submodule_search_locations)


class TestFileLoader(SourceFileLoader):
    """Compiles a test file with comparisons that say who decided them."""

    __test__ = False

    def __init__(self, name: str, path: str, files: TestFiles) -> None:
        super().__init__(name, path)
        self._files = files
        self._own: tuple[str, ...] = ()
        self._code: CodeType | None = None

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the file, never from or into a cache."""
        tree = ast.parse(self.get_data(self.path), self.path)
        self._own = tuple(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
        self._code = compile(ast.fix_missing_locations(_Rewriter().visit(tree)), self.path, "exec", dont_inherit=True)
        return self._code

    def exec_module(self, module: ModuleType) -> None:
        """Execute the file in its module."""
        module.__dict__.update(self._files.helpers)
        super().exec_module(module)
        if self._code is not None:
            self._files.imported.append((module, self._code, self._own))


class _Rewriter(ast.NodeTransformer):
    """``a == b`` becomes a call; a chain of comparisons stays."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        found = _OPERATORS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        if found is None:
            return node
        arguments = [node.left, ast.Constant(found[0]), node.comparators[0]]
        return ast.copy_location(ast.Call(ast.Name(_NAME, ast.Load()), arguments, []), node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Compare | ast.Constant):
            node.test = ast.copy_location(ast.Call(ast.Name(_TRUE, ast.Load()), [node.test], []), node.test)
        return node
