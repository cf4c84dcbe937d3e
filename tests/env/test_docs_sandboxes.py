"""The example of docs/sandboxes.md is a working backend."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import unavailable_reason
from t1_env.testing import check_session

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "sandboxes.md"
MARK = "<!-- tested by tests/env/test_docs_sandboxes.py -->"


@pytest.mark.namespaces
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
@pytest.mark.skipif(shutil.which("tar") is None, reason="the example unpacks with tar")
def test_the_example_backend_works(tmp_path: Path) -> None:
    (source,) = re.findall(rf"{MARK}\n```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source.replace("/tmp/t1-example", str(tmp_path / "far")), str(GUIDE), "exec"), names)
    make = names["make_pod_sandbox"]
    with make(SandboxSpec()) as sandbox:
        assert sandbox.run(["echo", "hi"]).stdout == b"hi\n"
        assert sandbox.run_in_clone("t1_env.sandbox.probe:echo", [1, 2]).payload == [1, 2]
        assert (tmp_path / "far").exists()
    assert not (tmp_path / "far").exists()
    check_session(make, cases=["trailing_comment", "unbalanced_quote"]).raise_on_failure()
