"""Dockerfiles as cached layers: what is built once, what is reused, and that a sandbox over layers is a whole sandbox."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from t1_env.errors import ImageBuildError
from t1_env.sandbox import builder
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.layers import LayerStore
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
from t1_env.shell import Session, ShellConfig

pytestmark = pytest.mark.namespaces

AS_ROOT = os.getuid() == 0
AS_ROOT_ONLY = pytest.mark.skipif(not AS_ROOT, reason="a sandbox that an ordinary user starts has no users but root")


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _own_stores(stores):
    return stores


@pytest.fixture
def context(tmp_path):
    directory = tmp_path / "environment"
    (directory / "files" / "sub").mkdir(parents=True)
    (directory / "files" / "a.txt").write_text("a\n")
    (directory / "files" / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (directory / "files" / "sub" / "run.sh").chmod(0o755)
    return directory


@pytest.fixture
def built_steps(monkeypatch):
    """Keywords and lines of the steps that were really carried out."""
    done: list[tuple[str, int]] = []
    original = builder._LayerExecutor.execute

    def execute(self, step):
        done.append((step.keyword, step.line))
        original(self, step)

    monkeypatch.setattr(builder._LayerExecutor, "execute", execute)
    return done


def sandbox(context: Path, body: str, *, base: str = "debian:bookworm", **options) -> LocalSandbox:
    (context / "Dockerfile").write_text(f"FROM {base}\n{body}")
    return LocalSandbox(SandboxSpec(image=ImageSource(context, **options)))


def sh(box, script: str) -> str:
    result = box.run(["bash", "-c", script], timeout_s=120)
    assert result.exit_code == 0, result
    return result.stdout.decode()


# ------------------------------------------------------------------------------------------------------------------------- building
def test_a_whole_build(context):
    body = (
        'ARG WHO=world\nENV GREETING="hello $WHO" PLAIN=1\nENV PATH=$PATH:/opt/bin\nWORKDIR /srv\nWORKDIR data\nCOPY files/ ./all/\n'
        'COPY files/a.txt renamed.txt\nCOPY --chmod=600 files/*.txt /etc/t1/\nADD ["files/a.txt", "/b"]\n'
        'RUN echo "$GREETING" > g && \\\n    pwd > where\nRUN ["touch", "exec form"]\nLABEL a=b\nEXPOSE 80\nCMD ["sleep", "infinity"]\n'
        "RUN rm -r /etc/pam.d && mkdir /etc/pam.d && rm /etc/nsswitch.conf && echo x >> /etc/profile && mkdir /opt/bin\n"
    )
    with sandbox(context, body) as box:
        assert dict(box.built.env) == {
            "GREETING": "hello world",
            "PLAIN": "1",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/bin",
        }
        assert (box.built.workdir, box.built.user) == ("/srv/data", None)
        assert "own system directories" in box.built.base
        assert [note.split(" ")[:3] for note in box.built.notes] == [["line", "15:", "EXPOSE"], ["line", "16:", "CMD"]]
        listing = sh(box, "cd /srv/data; find . | sort; cat g where renamed.txt /b; stat -c '%a %U' /etc/t1/*; all/sub/run.sh")
        assert listing.splitlines() == [
            *(".", "./all", "./all/a.txt", "./all/sub", "./all/sub/run.sh", "./exec form", "./g", "./renamed.txt", "./where"),
            *("hello world", "/srv/data", "a", "a", "600 root", "ran"),
        ]
        assert sh(box, "ls -A /etc/pam.d; test -d /opt/bin; test ! -e /etc/nsswitch.conf; tail -n1 /etc/profile") == "x\n"
        assert box.system_changes() == {}
        assert (sh(box, "hostname; stat -c %a /tmp /dev/shm /root"), box.run(["touch", "/tmp/x"]).exit_code) == ("t1\n1777\n1777\n700\n", 0)


def test_what_is_cached_is_not_built_again(context, built_steps):
    body = "RUN date +%N > /stamp\nCOPY files /data\nRUN date +%N >> /stamp\n"
    with sandbox(context, body) as first:
        stamps = sh(first, "cat /stamp")
        sh(first, "echo changed > /stamp; rm -r /data")
    assert built_steps == [("RUN", 2), ("COPY", 3), ("RUN", 4)]
    with sandbox(context, body) as second:
        assert sh(second, "cat /stamp; ls /data") == stamps + "a.txt\nsub\n"
    assert len(built_steps) == 3


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        (lambda c: (c / "files" / "a.txt").write_text("b\n"), ["COPY", "RUN"]),
        (lambda c: (c / "files" / "a.txt").chmod(0o600), ["COPY", "RUN"]),
        (lambda c: (c / "files" / "new").symlink_to("a.txt"), ["COPY", "RUN"]),
        (lambda c: (c / "files" / "sub").rename(c / "files" / "bus"), ["COPY", "RUN"]),
        (lambda c: (c / "not-copied").write_text("x"), []),
        (lambda c: os.utime(c / "files" / "a.txt", (1, 1)), []),
        (lambda c: c.rename(c.with_name("elsewhere")), []),
    ],
)
def test_a_change_of_what_is_copied_rebuilds_from_there(context, built_steps, change, rebuilt):
    body = "RUN true\nCOPY files /data\nRUN ls /data > /listing\n"
    with sandbox(context, body):
        built_steps.clear()
    change(context)
    if not context.exists():
        context = context.with_name("elsewhere")
    with sandbox(context, body) as box:
        assert [keyword for keyword, _ in built_steps] == rebuilt
        assert sh(box, "cat /listing") == sh(box, "ls /data")


@pytest.mark.parametrize(
    ("first", "second", "rebuilt"),
    [
        ("RUN echo a > /x", "RUN echo b > /x", True),
        ("RUN echo a > /x", "# comment\nRUN echo a > /x", False),
        ("ENV A=1\nRUN echo $A > /x", "ENV A=2\nRUN echo $A > /x", True),
        ("ARG A=1\nRUN echo $A > /x", "ARG A=2\nRUN echo $A > /x", True),
        ("RUN echo a > /x\nENV A=1", "RUN echo a > /x\nENV A=2", False),
        ("RUN echo a > /x\nLABEL A=1", "RUN echo a > /x\nCMD true", False),
        ("WORKDIR /a\nRUN pwd > /x", "WORKDIR /b\nRUN pwd > /x", True),
        ('SHELL ["bash", "-c"]\nRUN echo a > /x', "RUN echo a > /x", True),
        ("RUN <<E\necho a > /x\nE", "RUN <<E\necho b > /x\nE", True),
        ("COPY <<E /x\na\nE", "COPY <<E /x\nb\nE", True),
        ("COPY --chmod=600 files/a.txt /x", "COPY --chmod=640 files/a.txt /x", True),
    ],
)
def test_a_layer_is_named_by_all_that_it_depends_on(context, built_steps, first, second, rebuilt):
    with sandbox(context, first):
        built_steps.clear()
    with sandbox(context, second) as box:
        assert bool(built_steps) == rebuilt
        assert sh(box, "test -e /x; echo fine") == "fine\n"


def test_heredocs_and_shells(context):
    body = (
        'RUN <<EOF\necho one > /log\nif true; then\n  echo "$HOME" >> /log\nfi\nEOF\n'
        "RUN cat <<'E' >> /log && echo after >> /log\n$HOME stays\nE\n"
        "RUN <<X\n#!/bin/bash\nwords=(a b); echo ${#words[@]} >> /log\nX\n"
        'SHELL ["/bin/bash", "-c"]\nRUN x=(1 2 3); echo ${#x[@]} >> /log\nENV NAME=world\n'
        "COPY <<A <<'B' /copied/\nhello $NAME\nA\nhello $NAME\nB\n"
    )
    with sandbox(context, body) as box:
        assert sh(box, "cat /log /copied/A /copied/B; stat -c %a /copied/A") == (
            "one\n/root\n$HOME stays\nafter\n2\n3\nhello world\nhello $NAME\n644\n"
        )


def test_arguments_before_from_are_not_seen_after_it_unless_declared(context):
    (context / "Dockerfile").write_text('ARG TAG=bookworm\nARG B=2\nFROM debian:${TAG}\nARG B\nRUN echo "[$TAG][$B]${C+set}" > /x\nARG C\n')
    with LocalSandbox(SandboxSpec(image=ImageSource(context))) as box:
        assert "debian:bookworm" in box.built.base
        assert sh(box, "cat /x") == "[][2]\n"


def test_add_unpacks_archives(context):
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tar.xz", "w:xz"), ("no-archive.tar", None)):
        if mode is None:
            (context / name).write_bytes(b"not a tar archive")
            continue
        with tarfile.open(context / name, mode) as archive:
            member = tarfile.TarInfo(f"in-{name}/file")
            member.size, member.mode, member.uid, member.gid = 3, 0o640, 5 * AS_ROOT, 6 * AS_ROOT
            archive.addfile(member, io.BytesIO(b"abc"))
    body = "ADD a.tar a.tar.gz a.tar.xz /unpacked/\nADD no-archive.tar /kept/\nCOPY a.tar /kept/\n"
    with sandbox(context, body) as box:
        assert sh(box, "cd /unpacked; stat -c '%n %a %u:%g' in-a.tar/* in-a.tar.*/*; ls /kept") == (
            "".join(f"in-{name}/file 640 {'5:6' if AS_ROOT else '0:0'}\n" for name in ("a.tar", "a.tar.gz", "a.tar.xz"))
            + "a.tar\nno-archive.tar\n"
        )


def test_dockerignore(context):
    (context / "files" / "sub" / "deep").mkdir()
    for name in ("a.log", "sub/b.log", "sub/deep/c.log", "sub/deep/keep.log", "sub/deep/d.txt", "tmp"):
        (context / "files" / name).write_text("x")
    (context / ".dockerignore").write_text("# comment\n**/*.log\n!files/sub/deep/keep.log\nfiles/tmp\n/Dockerfile\n")
    with sandbox(context, "COPY . /all\nCOPY files /files\n") as box:
        expected = "a.txt\nsub/deep/d.txt\nsub/deep/keep.log\nsub/run.sh\n"
        assert sh(box, "cd /files; find . -type f | cut -c3- | sort") == expected
        assert sh(box, "cd /all/files; find . -type f | cut -c3- | sort; ls -A /all") == expected + ".dockerignore\nfiles\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("RUN echo oops >&2; exit 3", r"Dockerfile:2: RUN ended with status 3: oops"),
        ("WORKDIR /x\nRUN no-such-program", r":3: RUN ended with status 127"),
        (
            "RUN cat < /dev/tcp/192.0.2.1/80; bash -c 'cat < /dev/tcp/192.0.2.1/80'",
            r"(?s):2: .*Network is unreachable.*no network while an image",
        ),
        ("COPY missing /x", r":2: 'missing': no such file"),
        ("COPY --from=other /a /b", r":2: COPY --from=other is not supported"),
        ("COPY files/a.txt /etc/passwd/x", r":2: Not a directory"),
        ("COPY --chown=nobody-here files /x", r":2: no user 'nobody-here'"),
        ("USER nobody-here", r":2: no user 'nobody-here' in the image's /etc/passwd"),
        ("USER root:nothing", r":2: no group 'nothing'"),
        ("USER 70000", r":2: .*0 to 65535"),
        ("RUN --mount=type=cache,target=/x true", r":2: RUN --mount=type=cache,target=/x is not supported"),
    ],
)
def test_steps_that_fail_name_their_line_and_leave_no_layer(context, stores, body, message):
    with pytest.raises(ImageBuildError, match=message):
        sandbox(context, body).start()
    assert LayerStore().all() == []
    assert list(stores.cache.glob("layers/.*")) == []


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("scratch", ":1: FROM scratch"),
        ("debian@sha256:" + "0" * 64, ":1: FROM debian@sha256:0+: no such image was imported.*images map"),
        ("--platform=linux/s390x debian", "--platform=linux/s390x: this machine runs linux/"),
        ("$UNSET", ":1: FROM .UNSET: the variable is not set"),
        ("Bad:::Name", ":1: FROM Bad:::Name: .*not an image name"),
    ],
)
def test_bases_that_cannot_be(context, base, message):
    with pytest.raises(ImageBuildError, match=message):
        sandbox(context, "RUN true", base=base).start()


def test_builds_have_a_time_limit(context):
    with pytest.raises(ImageBuildError, match=r":2: the build ran out of time"):
        sandbox(context, "RUN sleep 100", build_timeout_s=0.5).start()


def test_background_processes_of_run_do_not_reach_the_layer(context):
    with sandbox(
        context, "RUN (while :; do date +%N > /beat; done) & sleep 0.2\nRUN cp /beat /before; sleep 0.3; cmp /beat /before\n"
    ) as box:
        assert sh(box, "cmp /beat /before; echo same") == "same\n"


# ---------------------------------------------------------------------------------------------------------------------------- users
@AS_ROOT_ONLY
def test_named_users(context):
    body = (
        "RUN useradd -m -s /bin/bash alice && usermod -aG adm alice\nWORKDIR /early\n"
        "USER alice\nWORKDIR /late\nRUN id -un > mine; echo $HOME >> mine\n"
        "COPY files/a.txt /late/copied\nCOPY --chown=alice:adm files /late/owned\nUSER root\nRUN echo root >> /early/log\nUSER alice\n"
    )
    with sandbox(context, body) as box:
        assert box.built.user == "alice"
        assert sh(box, "id -un; id -Gn; echo $HOME $USER; cat /late/mine") == "alice\nalice adm\n/home/alice alice\nalice\n/home/alice\n"
        owners = ("root:root /early", "alice:alice /late", "alice:alice /late/mine", "root:root /late/copied", "alice:adm /late/owned/sub")
        assert sh(box, "stat -c '%U:%G %n' /early /late /late/mine /late/copied /late/owned/sub").splitlines() == list(owners)
        assert box.run(["touch", "/usr/x"]).exit_code != 0
        process = box.spawn(["bash", "-c", "echo to-tty > $(tty) && id -un"], pty_size=(24, 80))
        output = b""
        try:
            while chunk := os.read(process.pty_fd, 1000):
                output += chunk
        except OSError:
            pass  # EIO: nobody has the terminal open any more
        os.close(process.pty_fd)
        assert output == b"to-tty\r\nalice\r\n"
        assert box.run(["id", "-un"], env={"HOME": "/x"}).stdout == b"alice\n"
        sh(box, "rm -rf ~; echo gone")
        with box.fork() as fork:
            assert sh(fork, "id -un; ls /late") == "alice\ncopied\nmine\nowned\n"


@AS_ROOT_ONLY
def test_the_shell_of_a_named_user(context):
    with sandbox(context, "RUN useradd -m alice\nUSER alice\nWORKDIR /home/alice\n") as box:
        session = Session(box, ShellConfig(cwd=box.built.workdir))
        try:
            session.start()
            assert session.run("id -un; pwd; echo to-tty > /dev/stderr; tty > /dev/null && echo $HOME").output.split() == [
                *("alice", "/home/alice", "to-tty", "/home/alice")
            ]
            assert session.run("kill -9 $$").state == "shell_exited"
            assert session.run("id -un; touch mine; stat -c %U mine").output == "alice\nalice\n"
        finally:
            session.close()


@AS_ROOT_ONLY
def test_users_by_number(context):
    with sandbox(context, "USER 1234:56\nRUN id > /tmp/id\n") as box:
        assert sh(box, "id; cat /tmp/id; echo $HOME") == "uid=1234 gid=56 groups=56\n" * 2 + "/\n"
        assert box.built.user == "1234"


# -------------------------------------------------------------------------------------------------- a sandbox over layers is whole
@pytest.fixture
def layered(context):
    body = (
        "RUN echo base > /srv/file && mkdir /srv/dir && touch /srv/dir/a /srv/dir/b && ln /srv/dir/a /srv/hard\n"
        "RUN rm /srv/dir/a && rm -r /etc/pam.d && echo 2 > /srv/two && echo l > /usr/local/lower\n"
        "RUN rm /srv/two && mkdir /srv/two && touch /srv/two/inside && rm -r /srv/dir\n"
        "RUN mkdir /srv/dir && touch /srv/dir/c && mkfifo /srv/pipe && chmod 2751 /srv/dir && chmod 711 /opt /\n"
    )
    with sandbox(context, body) as box:
        yield box


SURVEY = "cd /; find srv usr/local opt etc/pam.d app -printf '%p %y %m %U %n %l\\n' 2>/dev/null | sort; cat srv/file; stat -c %a / /opt"


def test_removals_and_replacements_through_layers(layered):
    assert sh(layered, "find /srv | sort; ls -d /etc/pam.d 2>/dev/null; stat -c '%a %n' /srv/dir / /opt") == (
        "/srv\n/srv/dir\n/srv/dir/c\n/srv/file\n/srv/hard\n/srv/pipe\n/srv/two\n/srv/two/inside\n2751 /srv/dir\n711 /\n711 /opt\n"
    )


def test_clones_over_layers(layered):
    before = layered.generation()
    result = layered.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", SURVEY]})
    assert result.payload["stdout"] == sh(layered, SURVEY)
    script = "rm -r /srv/dir /etc/passwd; echo changed > /srv/file; echo x > /usr/local/lower"
    assert layered.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", script]}).payload["exit_code"] == 0
    assert layered.generation() == before
    sh(layered, "echo more >> /srv/file; rm -r /srv/two; touch /opt/x")
    assert layered.generation() != before
    assert layered.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", SURVEY]}).payload["stdout"] == sh(layered, SURVEY)


def test_forks_over_layers(layered):
    sh(layered, "echo more >> /srv/file; rm /srv/dir/c; rm -r /srv/two; mkdir /srv/two")
    with layered.fork() as fork:
        assert sh(fork, SURVEY) == sh(layered, SURVEY)
        sh(fork, "echo fork >> /srv/file")
        assert sh(layered, "cat /srv/file") == "base\nmore\n"


def test_changes_of_the_base_system_are_told_from_the_images(layered):
    assert layered.system_changes() == {}
    sh(layered, "echo x >> /usr/local/lower; echo y >> /etc/hosts; touch /usr/local/new")
    assert layered.system_changes() == {}  # none of these is the base's
    sh(layered, "echo x >> /etc/profile; rm /etc/services; rm -r /etc/alternatives; mkdir /etc/alternatives")
    assert set(layered.system_changes()) == {"/etc/profile", "/etc/services", "/etc/alternatives"}


def test_hidden_paths_stay_hidden_and_out_of_layers(context):
    visible = next(path for path in sorted(Path("/usr/share").iterdir()) if path.is_dir() and any(path.iterdir()))
    (context / "Dockerfile").write_text(
        f"FROM x\nRUN ls /usr/share > /listing; mkdir -p {visible}; touch {visible}/mine /usr/share/other\n"
    )
    with LocalSandbox(SandboxSpec(image=ImageSource(context), hide=(visible,))) as box:
        assert f"{visible.name}\n" not in sh(box, "cat /listing")
        assert sh(box, f"ls -A {visible}; ls /usr/share/other") == "mine\n/usr/share/other\n"
        assert box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["ls", "-A", str(visible)]}).payload["stdout"] == "mine\n"


def test_only_the_sandboxs_own_writes_count_against_its_storage(context):
    (context / "Dockerfile").write_text("FROM x\nRUN head -c 50M /dev/zero > /big\n")
    with LocalSandbox(SandboxSpec(image=ImageSource(context), storage_mb=8)) as box:
        assert sh(box, "stat -c %s /big; head -c 4M /dev/zero > /small; echo fits") == f"{50 << 20}\nfits\n"
        assert box.run(["bash", "-c", "head -c 20M /dev/zero > /large"]).exit_code != 0


def test_an_image_cannot_put_links_where_kernel_filesystems_go(context, tmp_path):
    """What is mounted must land inside, whatever the archive says about /dev and /proc."""
    victim = tmp_path / "victim"
    victim.mkdir()
    with tarfile.open(context / "evil.tar", "w") as archive:
        for name in ("dev", "proc", "sys"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, str(victim)
            archive.addfile(member)
    with sandbox(context, "ADD evil.tar /\nRUN echo still builds > /x\n") as box:
        assert sh(box, "cat /x; stat -c %F /dev /proc; echo > /dev/null; readlink /proc/self > /dev/null; echo fine") == (
            "still builds\ndirectory\ndirectory\nfine\n"
        )
        assert box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["stat", "-c", "%F", "/dev"]}).payload["stdout"] == "directory\n"
    assert list(victim.iterdir()) == []


def test_many_layers(context):
    with sandbox(
        context, "".join(f"RUN echo {index} > /etc/layer-{index} && rm -f /etc/layer-{index - 5}\n" for index in range(40))
    ) as box:
        assert sh(box, "ls -v /etc/layer-* | xargs -n1 basename") == "".join(f"layer-{index}\n" for index in range(35, 40))


_ORDINARY = """
import pathlib
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.layers import LayerStore
from t1_env.sandbox.local import LocalSandbox
context = pathlib.Path(sys.argv[1], "environment")
(context / "files").mkdir(parents=True, exist_ok=True)
(context / "files" / "a").write_text("a")
(context / "closed").mkdir(mode=0o700, exist_ok=True)
(context / "Dockerfile").write_text(
    "FROM debian\\nWORKDIR /app\\nCOPY files /app\\n"
    "RUN rm /etc/profile && rm -r /etc/pam.d && mkdir /etc/pam.d && mkdir -m 0 /app/locked\\n"
    "RUN echo $USER > me; rm a; chmod 700 /opt\\nCOPY closed /app/closed\\n")
for turn in range(2):
    with LocalSandbox(SandboxSpec(image=ImageSource(context))) as box:
        print(box.run(["bash", "-c", "ls -A /app /etc/pam.d; cat me; test -e /etc/profile; echo $?; stat -c %a /opt /app/locked"]).stdout)
        with box.fork() as fork:
            print(fork.run(["bash", "-c", "echo x > /app/me; cat /app/me"]).stdout)
        print(box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["cat", "/app/me"]}).payload["stdout"])
(context / "Dockerfile").write_text("FROM debian\\nUSER nobody\\n")
try:
    LocalSandbox(SandboxSpec(image=ImageSource(context))).start()
except Exception as error:
    print(error)
print(LayerStore().prune().removed)
"""


def test_an_ordinary_user_can_build(ordinary_user):
    once = "b'/app:\\nclosed\\nlocked\\nme\\n\\n/etc/pam.d:\\nroot\\n1\\n700\\n0\\n'\nb'x\\n'\nroot\n\n"
    *same, refusal, removed = ordinary_user(_ORDINARY).rstrip("\n").split("\n")
    assert "\n".join(same) + "\n" == once * 2
    assert "Dockerfile:2: a sandbox that an ordinary user starts has no users but root" in refusal
    assert removed == "3"
