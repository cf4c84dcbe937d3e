"""``fork()`` of a local sandbox: the same files, nothing shared."""

from __future__ import annotations

import os
import time

import pytest

from t1_env.errors import SandboxDied
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

pytestmark = pytest.mark.namespaces

AS_ROOT = os.getuid() == 0


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def sandbox():
    with LocalSandbox() as box:
        yield box


def sh(box, script: str) -> str:
    result = box.run(["bash", "-c", script], timeout_s=120)
    assert result.exit_code == 0, result
    return result.stdout.decode()


# A directory's size belongs to its filesystem, and two files are the sandbox's own; everything else must be equal.
SURVEY = """cd /
find app tmp srv home root run var dev/shm opt etc -not -path etc/hosts -not -path etc/hostname \\
    -printf '%p %y %m %U %G %n %T@ %l %s %b\\n' | sed -E 's/^(.* d .*) [0-9]+ [0-9]+$/\\1/' | sort
stat -c '%n %a %u' / /usr /opt /etc
getfattr -Rd -m user. app 2>/dev/null | sort
"""
EVERYTHING = """cd /app
echo text > a; ln a b; ln a other-name; ln -s a link; ln -s /nowhere broken; mkdir -m 2750 d; mkfifo -m 600 pipe
touch 'bad\\xffname' 'new
line'; : > empty; chmod 4755 b; echo s > /dev/shm/s
touch -d '2001-02-03 04:05:06.789' old d; touch -h -d 2002-02-02 link; chmod 000 old; chmod 711 / /opt
truncate -s 300M hole; printf x | dd of=hole bs=1 seek=200000000 conv=notrunc 2>/dev/null; head -c 3000000 /dev/urandom > big
rm /etc/nsswitch.conf; rm -r /etc/pam.d; mkdir /etc/pam.d; echo o > /etc/pam.d/only; rm -r /etc/ssl; echo x >> /etc/profile
setfattr -n user.note -v kept a 2>/dev/null || true
"""
AS_ROOT_TOO = "chown 1000:1001 big; chown -h 7:7 broken; rm /usr/bin/nohup; rm -r /usr/share/doc; chown 3:4 d"


def test_every_kind_of_file_is_copied_exactly(sandbox):
    sh(sandbox, EVERYTHING)
    if AS_ROOT:
        sh(sandbox, AS_ROOT_TOO)
    expected = sh(sandbox, SURVEY)
    with sandbox.fork() as fork:
        assert sh(fork, SURVEY) == expected
        assert sh(fork, "cat other-name; dd if=hole bs=1 skip=200000000 count=1 2>/dev/null; cat /etc/pam.d/*") == "text\nxo\n"
        assert sh(fork, "md5sum < big; ls /etc/ssl 2>&1 | wc -l") == sh(sandbox, "md5sum < big; echo 1")
        if AS_ROOT:
            assert fork.run(["nohup"]).exit_code == 127


def test_the_two_share_nothing_afterwards(sandbox):
    sh(sandbox, "echo 1 > /app/file; echo 2 > /usr/local-file; mkdir /app/dir")
    with sandbox.fork() as fork, fork.fork() as grandchild:
        sh(fork, "echo changed > /app/file; rm /usr/local-file; rmdir /app/dir; touch /etc/new")
        sh(sandbox, "echo original >> /app/file")
        assert sh(sandbox, "cat /app/file /usr/local-file; ls -d /app/dir; ls /etc/new 2>&1 || true").startswith(
            "1\noriginal\n2\n/app/dir\nls:"
        )
        assert sh(grandchild, "cat /app/file /usr/local-file; ls -d /app/dir") == "1\n2\n/app/dir\n"
        assert sh(fork, "cat /app/file") == "changed\n"
        sandbox.close()
        assert sh(fork, "cat /app/file") == "changed\n"


def test_a_fork_is_a_whole_sandbox(sandbox):
    sh(sandbox, "echo x >> /etc/profile; echo a > /app/a")
    with sandbox.fork() as fork:
        assert {"fork", "clone"} <= fork.capabilities
        assert fork.spec == sandbox.spec
        assert set(fork.system_changes()) == set(sandbox.system_changes()) == {"/etc/profile"}
        before = fork.generation()
        result = fork.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", "cat /app/a; echo b > /app/a"]})
        assert result.payload["stdout"] == "a\n"
        assert fork.generation() == before
        fork.put(b"new", "/app/b")
        assert fork.generation() != before
        assert fork.get("/app/b") == b"new"


def test_processes_are_not_copied_and_stand_still_only_for_the_copy(sandbox):
    process = sandbox.spawn(["bash", "-c", "i=0; while :; do i=$((i+1)); echo $i > /app/n.new; mv /app/n.new /app/n; done"])
    deadline = time.monotonic() + 30
    while sandbox.run(["test", "-s", "/app/n"]).exit_code != 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    with sandbox.fork() as fork:
        copied = int(fork.get("/app/n"))
        assert len(sh(fork, "ls -d /proc/[0-9]*").split()) < 6
        while int(sandbox.get("/app/n")) <= copied and time.monotonic() < deadline:
            time.sleep(0.01)
        assert int(sandbox.get("/app/n")) > copied
        assert int(fork.get("/app/n")) == copied
    assert process.poll() is None
    process.kill()


def test_deep_trees_are_copied(sandbox):
    """Deeper than a path may be long, than Python recurses and than a process may have files open."""
    down = "d=$(printf 'ddd/%.0s' {1..900}); cd -P /app; mkdir -p $d; cd -P $d; mkdir -p $d; cd -P $d"
    sh(sandbox, f"{down}; echo bottom > file")
    before = sandbox.generation()
    with sandbox.fork() as fork:
        assert sh(fork, f"{down}; cat file") == "bottom\n"
    sh(sandbox, f"{down}; echo changed > file")
    assert sandbox.generation() != before
    assert sandbox.system_changes() == {}


def test_a_fork_of_what_is_gone_is_an_error(sandbox):
    sandbox.close()
    with pytest.raises(SandboxDied):
        sandbox.fork()


def test_a_full_disk_can_be_forked():
    with LocalSandbox(SandboxSpec(storage_mb=8)) as box:
        box.run(["bash", "-c", "head -c 20M /dev/zero > /app/full"])
        with box.fork() as fork:
            assert fork.run(["stat", "-c", "%s", "/app/full"]).stdout == box.run(["stat", "-c", "%s", "/app/full"]).stdout
            assert fork.run(["bash", "-c", "echo more > /app/more"]).exit_code != 0
            sh(fork, "rm /app/full; echo more > /app/more")
        assert sh(box, "rm /app/full; echo fine") == "fine\n"


_UNPRIVILEGED = """
from t1_env.sandbox.local import LocalSandbox
with LocalSandbox() as box:
    box.run(["bash", "-c", "echo 1 > /app/a; ln /app/a /app/b; rm /etc/profile; mkdir -m 700 /app/d; mkfifo /app/p"])
    with box.fork() as fork:
        box.run(["bash", "-c", "echo 2 > /app/a"])
        script = "cat /app/a; stat -c '%h %U' /app/b; test -e /etc/profile; echo $?; id -u; stat -c '%F %a' /app/p /app/d"
        sys.stdout.buffer.write(fork.run(["bash", "-c", script]).stdout)
"""


def test_an_ordinary_user_can_fork(ordinary_user):
    assert ordinary_user(_UNPRIVILEGED) == "1\n2 root\n1\n0\nfifo 644\ndirectory 700\n"
