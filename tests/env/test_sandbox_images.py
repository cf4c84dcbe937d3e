"""The Dockerfile subset and how sandboxes are found by name."""

from __future__ import annotations

import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from t1_env.errors import ConfigError, ImageBuildError, SandboxError
from t1_env.sandbox import registry
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.build import build_environment
from t1_env.sandbox.dockerfile import Instruction, parse_dockerfile, substitute
from t1_env.sandbox.local import LocalSandbox, unavailable_reason


# ------------------------------------------------------------------------------------------------------------------------ parsing
def test_comments_blank_lines_and_continuations():
    source = "# syntax=x\n\nARG V=1\nfrom debian:$V\n  run a \\\n  # in between\n\n    && b\nENV A=1 \\\n    B=2\n"
    assert parse_dockerfile(source) == (
        Instruction(3, "ARG", "V=1"),
        Instruction(4, "FROM", "debian:$V"),
        Instruction(5, "RUN", "a     && b"),
        Instruction(9, "ENV", "A=1     B=2"),
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no FROM"),
        ("RUN true\nFROM x", ":1: RUN before FROM"),
        ("LABEL a=b\nFROM x", ":1: LABEL before FROM"),
        ("FROM x\nONBUILD RUN true", ":2: ONBUILD is not supported.*FROM, WORKDIR"),
        ("FROM x\n\nNONSENSE", ":3: NONSENSE is not supported"),
        ("FROM x AS a\nFROM y", ":2: a second FROM"),
        ("FROM x\nRUN", ":2: RUN needs an argument"),
        ("FROM x\nRUN true \\", ":2: .*backslash"),
        ("FROM x\nRUN cat <<EOF\ntext", ":2: the heredoc <<EOF has no line 'EOF'"),
        ("# escape=x\nFROM x", ":1: the escape character"),
    ],
)
def test_what_is_outside_the_subset_is_an_error_with_its_line(source, message):
    with pytest.raises(ImageBuildError, match=message):
        parse_dockerfile(source)


@pytest.mark.parametrize(
    ("source", "text", "heredocs", "next_keyword"),
    [
        ("RUN <<EOF\na $b\n  c\nEOF\nENV A=1", "<<EOF", [("EOF", "a $b\n  c\n", True)], "ENV"),
        ("RUN cat <<-'END' > /x && true\n\ta\n\tEND\nUSER root", "cat <<-'END' > /x && true", [("END", "a\n", False)], "USER"),
        ('COPY <<A <<"B" /x/\n1\nA\n2\nB\nRUN true', '<<A <<"B" /x/', [("A", "1\n", True), ("B", "2\n", False)], "RUN"),
        (
            "RUN <<EOF\n# no comment\n\nRUN no instruction\nEOF\nRUN true",
            "<<EOF",
            [("EOF", "# no comment\n\nRUN no instruction\n", True)],
            "RUN",
        ),
        ("RUN cat <<< text\nRUN true", "cat <<< text", [], "RUN"),
        ("RUN echo $((1<<3)) $(( 1 << 3 ))\nRUN true", "echo $((1<<3)) $(( 1 << 3 ))", [], "RUN"),
        ("ENV A=<<EOF\nRUN true", "A=<<EOF", [], "RUN"),
    ],
)
def test_heredocs(source, text, heredocs, next_keyword):
    first, second = parse_dockerfile("FROM x\n" + source)[1:3]
    assert (first.text, [(h.word, h.text, h.expand) for h in first.heredocs]) == (text, heredocs)
    assert second.keyword == next_keyword


def test_the_escape_character_can_be_a_backtick():
    assert parse_dockerfile("# escape=`\nFROM x\nRUN a `\n b\\\nRUN c")[1:] == (Instruction(3, "RUN", "a  b\\"), Instruction(5, "RUN", "c"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A/${B}", "1/two"),
        ("${C:-default}", "default"),
        ("${A:-default}", "1"),
        ("${A:+set}${C:+set}", "set"),
        ("${C:-$A}", "1"),
        (r"\$A", "$A"),
        ("$C", ""),
        ("5$", "5$"),
    ],
)
def test_substitution(text, expected):
    assert substitute(text, {"A": "1", "B": "two"}) == expected


# ----------------------------------------------------------------------------------------------------------------------- building
@pytest.fixture(scope="module")
def _namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def sandbox(_namespaces):
    with LocalSandbox() as box:
        yield box


@pytest.fixture
def context(tmp_path):
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "a.txt").write_text("a\n")
    (tmp_path / "files" / "b.txt").write_text("b\n")
    (tmp_path / "files" / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "files" / "sub" / "run.sh").chmod(0o755)
    return tmp_path


def build(box: LocalSandbox, context: Path, body: str, **options):
    (context / "Dockerfile").write_text("FROM debian:bookworm\n" + body)
    return build_environment(box, context, **options)


@pytest.mark.namespaces
def test_a_whole_build(sandbox, context):
    built = build(
        sandbox,
        context,
        'ARG WHO=world\nENV GREETING="hello $WHO" PLAIN=1\nENV OLD style value\nUSER root\nWORKDIR /srv\nWORKDIR data\n'
        'COPY files/ ./all/\nCOPY files/a.txt renamed.txt\nCOPY --chmod=600 files/*.txt /etc/t1/\nADD ["files/b.txt", "/b"]\n'
        'RUN echo "$GREETING" > g && \\\n    pwd > where\nRUN ["touch", "exec form"]\n',
    )
    assert dict(built.env) == {"GREETING": "hello world", "PLAIN": "1", "OLD": "style value"}
    assert built.workdir == "/srv/data"
    listing = sandbox.run(
        ["bash", "-c", "cd /srv/data; find . | sort; cat g where renamed.txt /b; stat -c '%a %U' /etc/t1/*; all/sub/run.sh"]
    )
    assert listing.stdout.decode().splitlines() == [
        *(".", "./all", "./all/a.txt", "./all/b.txt", "./all/sub", "./all/sub/run.sh", "./exec form", "./g", "./renamed.txt", "./where"),
        *("hello world", "/srv/data", "a", "b", "600 root", "600 root", "ran"),
    ]


@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("RUN echo oops >&2; exit 3", ":2: RUN ended with status 3: oops"),
        ("WORKDIR /x\nRUN no-such-program", ":3: RUN ended with status 127"),
        ("COPY missing /x", ":2: 'missing': no such file"),
        ("COPY *.none /x/", "matches nothing"),
        ("COPY ../outside /x", "leads outside"),
        ("COPY link /x", "leads outside"),
        ("COPY files/a.txt files/b.txt /x", "ends in '/'"),
        ("COPY files/a.txt", "a source and a destination"),
        ("COPY --from=other /a /b", "--from=other"),
        ("COPY --chown=alice files/a.txt /x", "--chown=alice"),
        ("ADD https://example.org/x /x", "no network"),
        ("ADD files.tar.gz /x", "no such file"),
        ("ADD archive.tgz /x", "ADD does not unpack archives in this sandbox"),
        ("USER alice", "only root"),
        ("ENV A", "ENV expects NAME=value"),
        ("ENV 1A=2", "not a variable name"),
        ("RUN --mount=type=cache,target=/x true", "RUN --mount=type=cache,target=/x is not supported"),
        ("RUN echo Could not resolve host: example.org; exit 6", "no network while an image is built"),
        ("SHELL bash -c", ":2: SHELL expects"),
        ("COPY --parents files /x", "COPY --parents is not supported"),
        ("COPY 'files /x", "quotation"),
    ],
)
def test_steps_that_fail_name_their_line(sandbox, context, body, message):
    (context / "link").symlink_to("/etc/passwd")
    with tarfile.open(context / "archive.tgz", "w:gz") as archive:
        archive.add(context / "files", "inner")
    with pytest.raises(ImageBuildError, match=message):
        build(sandbox, context, body)


@pytest.mark.namespaces
def test_builds_have_a_time_limit(sandbox, context):
    with pytest.raises(ImageBuildError, match=r":2: the build ran out of time"):
        build(sandbox, context, "RUN sleep 100", build_timeout_s=0.3)


@pytest.mark.namespaces
def test_a_missing_dockerfile_is_an_error(sandbox, tmp_path):
    with pytest.raises(ImageBuildError, match="Dockerfile"):
        build_environment(sandbox, tmp_path)


# ----------------------------------------------------------------------------------------------------------------------- registry
def test_local_by_name():
    box = registry.make_sandbox("local", SandboxSpec(hostname="named"))
    assert isinstance(box, LocalSandbox)
    assert box.spec.hostname == "named"
    assert not box.alive
    assert "local" in registry.sandbox_names()


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"'lcoal'.*expected one of .*local.*did you mean 'local'"):
        registry.make_sandbox("lcoal")
    with pytest.raises(ConfigError, match="expected one of") as caught:
        registry.make_sandbox("zzz")
    assert "did you mean" not in str(caught.value)


def _third_party(spec: SandboxSpec) -> LocalSandbox:
    return LocalSandbox(spec)


def test_third_parties_register_by_entry_point(monkeypatch):
    points = [
        metadata.EntryPoint("theirs", "there:make", registry.ENTRY_POINT_GROUP),
        metadata.EntryPoint("broken", "no_such_module_anywhere:make", registry.ENTRY_POINT_GROUP),
        metadata.EntryPoint("wrong", "there:make", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)])
    loaders = {"theirs": _third_party, "wrong": lambda spec: object()}
    original = metadata.EntryPoint.load
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: loaders.get(self.name) or original(self))
    assert registry.sandbox_names()[-3:] == ("broken", "theirs", "wrong")
    assert registry.make_sandbox("theirs", SandboxSpec(hostname="third")).spec.hostname == "third"
    with pytest.raises(SandboxError, match="could not be loaded"):
        registry.make_sandbox("broken")
    with pytest.raises(SandboxError, match="is not a Sandbox"):
        registry.make_sandbox("wrong")
