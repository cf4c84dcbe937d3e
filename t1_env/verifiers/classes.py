"""What each verifier needs to be judged: files, programs it starts, or the agent's live processes.

A task may say so in ``[metadata.t1] classes``. What it does not name is inferred from the source of the tests: from what a test function
uses, itself or through helpers and fixtures of its file and the conftest files above it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from t1_env.tasks.task import Task

VerifierClass: TypeAlias = Literal["pure", "exec", "service"]
PURE: Final = "pure"
EXEC: Final = "exec"
SERVICE: Final = "service"

_PROGRAMS: Final = re.compile(r"subprocess\b|pexpect\b|pty\b|asyncio\.create_subprocess|os\.(system|popen|exec|spawn|posix_spawn|fork)")
_BACKGROUND: Final = re.compile(
    r"subprocess\.Popen|pexpect\.|pty\.|asyncio\.create_subprocess|os\.(spawn|posix_spawn|fork)|multiprocessing\.|http\.server|socketserver"
)
_CLIENTS: Final = re.compile(
    r"(socket|http\.client|urllib\.request|urllib3|requests|httpx|aiohttp|websockets?|ftplib|smtplib|imaplib|poplib|telnetlib|xmlrpc"
    r"|paramiko|psycopg2?|pymysql|redis|grpc|pymongo|asyncio\.open_connection)\b"
)
_CLIENT_PROGRAMS: Final = re.compile(r"\b(curl|wget|nc|ncat|netcat|telnet|redis-cli|psql|mysql|ssh|http|grpcurl|websocat)\b|/dev/tcp/")
_HERE: Final = re.compile(r"localhost|\b127\.\d|\[::1\]|\b0\.0\.0\.0\b")
_ASKS_FOR_ALL: Final = "autouse"


def classes_of(task: Task, ids: Sequence[str]) -> dict[str, VerifierClass]:
    """The class of each verifier of a task.

    Args:
        task: The task.
        ids: The frozen list.

    Returns:
        Verifier id -> class. Ids that name no test function (scores of a script) are ``exec`` unless the task says otherwise.
    """
    declared = task.metadata.classes
    if isinstance(declared, str):
        return dict.fromkeys(ids, declared)
    inferred = _inferred(str(task.tests_dir), task.digest)
    found: dict[str, VerifierClass] = {}
    for name in ids:
        bare = name.partition("[")[0]
        found[name] = declared.get(name) or declared.get(bare) or inferred.get(bare, EXEC)
    return found


def needs_live_processes(task: Task, ids: Sequence[str]) -> bool:
    """Whether some verifier of a task is judged by what the agent's processes answer, and not by files alone."""
    return SERVICE in classes_of(task, ids).values()


@dataclass(slots=True)
class _Symbol:
    """A function, class or assignment at the top of a file: what it mentions."""

    names: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


@functools.lru_cache(maxsize=1024)
def _inferred(tests_dir: str, digest: str) -> Mapping[str, VerifierClass]:
    """Node id without parameters -> class, for every test function of a tests directory; ``digest`` says when to look again."""
    found: dict[str, VerifierClass] = {}
    root = Path(tests_dir)
    for path in sorted({*root.rglob("test_*.py"), *root.rglob("*_test.py")}):
        symbols, tests = _read(path)
        for conftest in (parent / "conftest.py" for parent in path.parents if parent == root or root in parent.parents):
            if conftest.is_file():
                symbols = {**_read(conftest)[0], **symbols}
        always = [name for name, symbol in symbols.items() if _ASKS_FOR_ALL in symbol.names]
        for test in tests:
            start = (*test.split("::"), *always)
            found[f"{path.relative_to(root).as_posix()}::{test}"] = _judge([symbols[name] for name in _reachable(symbols, start)])
    return found


def _read(path: Path) -> tuple[dict[str, _Symbol], list[str]]:
    """The symbols of a file and its test functions (``Class::method`` for methods); nothing of a file that does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return {}, []
    modules = dict(_imports(tree))
    symbols: dict[str, _Symbol] = {}
    tests: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            symbols[node.name] = _mentions(node, modules)
            tests += [node.name] if node.name.startswith("test") else []
        elif isinstance(node, ast.ClassDef):
            tests += [
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test")
            ]
            symbols.update({each.name: _mentions(each, modules) for each in node.body if isinstance(each, ast.FunctionDef)})
            tested = {test.rpartition("::")[2] for test in tests}
            shared = [each for each in node.body if not (isinstance(each, ast.FunctionDef) and each.name in tested)]
            symbols[node.name] = _mentions(ast.Module(body=list(shared), type_ignores=[]), modules)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    symbols[target.id] = _mentions(node, modules)
    return symbols, tests


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in the file, what it stands for) of every import, wherever it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0], alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _mentions(tree: ast.AST, modules: Mapping[str, str]) -> _Symbol:
    symbol = _Symbol()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            symbol.names.add(node.id)
            symbol.uses.add(modules.get(node.id, ""))
        elif isinstance(node, ast.arg):
            symbol.names.add(node.arg)  # a fixture, if it is one
        elif isinstance(node, ast.keyword) and node.arg == _ASKS_FOR_ALL:
            symbol.names.add(_ASKS_FOR_ALL)
        elif isinstance(node, ast.Attribute):
            symbol.names.add(node.attr)  # a method of the same class
            symbol.uses.add(_dotted(node, modules))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            symbol.texts.append(node.value)
            symbol.names.add(node.value)  # usefixtures("name")
    return symbol


def _dotted(node: ast.Attribute, modules: Mapping[str, str]) -> str:
    parts = [node.attr]
    value: ast.expr = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    if not isinstance(value, ast.Name) or value.id not in modules:
        return ""
    return ".".join([modules[value.id], *reversed(parts)])


def _reachable(symbols: Mapping[str, _Symbol], start: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    pending = [name for name in start if name in symbols]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += [other for other in symbols[name].names if other in symbols and not other.startswith("test")]
    return seen


def _judge(symbols: Iterable[_Symbol]) -> VerifierClass:
    uses: set[str] = set()
    text = ""
    for symbol in symbols:
        uses |= symbol.uses
        text += "\n".join([*symbol.texts, ""])
    starts = any(_PROGRAMS.match(use) for use in uses)
    asks = any(_CLIENTS.match(use) for use in uses) or (starts and _CLIENT_PROGRAMS.search(text) is not None)
    if asks and _HERE.search(text) and not any(_BACKGROUND.match(use) for use in uses):
        return SERVICE  # somebody must be there to answer, and the test starts nobody
    return EXEC if starts else PURE
