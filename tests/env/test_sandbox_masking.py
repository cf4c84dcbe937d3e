"""Views of a clone: what an agent did to the base system is found, and taken back where the view says so; live clones."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from t1_env.sandbox.base import CloneView, ImageSource, SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

pytestmark = pytest.mark.namespaces

EXECUTE = "t1_env.sandbox.probe:execute"
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
AS_ROOT_ONLY = pytest.mark.skipif(
    os.getuid() != 0, reason="an ordinary user's sandbox cannot change the host's files: they belong to nobody"
)


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def sandbox():
    with LocalSandbox() as box:
        yield box


def sh(box: LocalSandbox, script: str) -> str:
    result = box.run(["bash", "-c", script])
    assert result.exit_code == 0, result
    return result.stdout.decode()


def look(box: LocalSandbox, script: str, *, restored: bool = False, **view) -> tuple[str, tuple[str, ...]]:
    """What a script prints in a clone, and what the clone says was masked."""
    payload = {"argv": ["bash", "-c", script]}
    result = box.run_in_clone(EXECUTE, payload, view=CloneView(restored=restored, search_path=PATH, **view))
    assert result.error is None, result.error
    return result.payload["stdout"], result.masked


def both(box: LocalSandbox, script: str, **view) -> tuple[str, str, tuple[str, ...]]:
    """What a script prints in the agent's view, in the restored view, and what was masked."""
    theirs, masked = look(box, script, **view)
    ours, again = look(box, script, restored=True, **view)
    assert masked == again
    return theirs, ours, masked


LIE = "printf '#!/bin/sh\\necho lie\\n'"


def test_an_untouched_system_has_nothing_to_mask(sandbox):
    sh(sandbox, "echo x > /app/x; echo y > /tmp/y; mkdir -p /usr/local/lib/new /opt/new; echo z > /opt/new/z; echo a > /etc/app.conf")
    assert both(sandbox, "cat /app/x /opt/new/z /etc/app.conf") == ("x\nz\na\n", "x\nz\na\n", ())
    assert sandbox.run_in_clone(EXECUTE, {"argv": ["true"]}).masked == ()


@AS_ROOT_ONLY
class TestPrograms:
    def test_a_replaced_one(self, sandbox):
        before = sh(sandbox, "stat -c '%a %U %s' /usr/bin/nohup; sha256sum < /usr/bin/nohup")
        sh(sandbox, f"{LIE} > /usr/bin/nohup")
        theirs, ours, masked = both(sandbox, "stat -c '%a %U %s' /usr/bin/nohup; sha256sum < /usr/bin/nohup")
        assert (theirs != before, ours == before, masked) == (True, True, ("/usr/bin/nohup",))

    def test_a_large_one(self, sandbox):
        sh(sandbox, f"{LIE} > /usr/bin/git; chmod +x /usr/bin/git") if Path("/usr/bin/git").exists() else pytest.skip("no git here")
        theirs, ours, masked = both(sandbox, "git --version")
        assert (theirs, ours.split()[:2], masked) == ("lie\n", ["git", "version"], ("/usr/bin/git",))

    def test_a_removed_one(self, sandbox):
        sh(sandbox, "rm /usr/bin/nohup")
        script = "test -x /usr/bin/nohup && echo there || echo gone"
        assert both(sandbox, script) == ("gone\n", "there\n", ("/usr/bin/nohup",))

    def test_one_that_lost_its_mode(self, sandbox):
        sh(sandbox, "chmod 600 /usr/bin/nohup")
        theirs, ours, masked = both(sandbox, "stat -c %a /usr/bin/nohup")
        assert (theirs, ours, masked) == ("600\n", "755\n", ("/usr/bin/nohup",))

    def test_one_that_became_a_link(self, sandbox):
        sh(sandbox, f"{LIE} > /app/lie; chmod +x /app/lie; ln -sf /app/lie /usr/bin/nohup")
        theirs, ours, masked = both(sandbox, "readlink /usr/bin/nohup || echo none")
        assert (theirs, ours, masked) == ("/app/lie\n", "none\n", ("/usr/bin/nohup",))

    def test_a_link_that_leads_elsewhere(self, sandbox):
        link = sh(sandbox, "find /usr/bin -maxdepth 1 -type l | head -n 1").strip()
        target = sh(sandbox, f"readlink {link}")
        sh(sandbox, f"ln -sf /app/lie {link}")
        assert both(sandbox, f"readlink {link}") == ("/app/lie\n", target, (link,))

    def test_one_that_is_as_it_was_is_not_masked(self, sandbox):
        sh(sandbox, "cp -p /usr/bin/nohup /tmp/n; rm /usr/bin/nohup; cp -p /tmp/n /usr/bin/nohup")
        assert look(sandbox, "true")[1] == ()

    def test_a_directory_that_was_swapped(self, sandbox):
        count = sh(sandbox, "ls /usr/share/zoneinfo | wc -l")
        for script in ("mkdir /app/z; ln -s /app/z", "mkdir", "echo x >"):
            sh(sandbox, f"rm -rf /app/z /usr/share/zoneinfo; {script} /usr/share/zoneinfo")
            theirs, ours, masked = both(sandbox, "ls /usr/share/zoneinfo | wc -l")
            assert (theirs != count, ours, masked) == (True, count, ("/usr/share/zoneinfo",))
        sh(sandbox, "rm -rf /usr/share/zoneinfo")
        assert both(sandbox, "ls /usr/share/zoneinfo 2>/dev/null | wc -l") == ("0\n", count, ("/usr/share/zoneinfo",))


class TestShadows:
    @pytest.mark.parametrize("directory", ["/usr/local/bin", "/usr/local/sbin"])
    def test_a_program_earlier_in_the_path(self, sandbox, directory):
        sh(sandbox, f"mkdir -p {directory}; {LIE} > {directory}/cat; chmod +x {directory}/cat; echo true > /app/x")
        assert both(sandbox, "cat /app/x") == ("lie\n", "true\n", (f"{directory}/cat",))

    def test_a_directory_of_the_path_that_is_a_link(self, sandbox):
        sh(sandbox, f"mkdir /app/bin; {LIE} > /app/bin/cat; chmod +x /app/bin/cat; echo true > /app/x")
        sh(sandbox, "rm -rf /usr/local/sbin; ln -s /app/bin /usr/local/sbin")
        assert both(sandbox, "cat /app/x") == ("lie\n", "true\n", ("/usr/local/sbin",))

    def test_a_path_directory_of_the_agents_own(self, sandbox):
        sh(sandbox, f"mkdir -p /root/bin; {LIE} > /root/bin/cat; cp /root/bin/cat /root/bin/mine; chmod +x /root/bin/*")
        payload = {"argv": ["ls", "/root/bin"]}
        view = CloneView(restored=True, search_path=("/root/bin", *PATH))
        result = sandbox.run_in_clone(EXECUTE, payload, view=view)
        assert (result.payload["stdout"], result.masked) == ("mine\n", ("/root/bin/cat",))

    def test_a_new_program_stays(self, sandbox):
        sh(sandbox, f"mkdir -p /usr/local/bin; {LIE} > /usr/local/bin/my-tool; chmod +x /usr/local/bin/my-tool")
        assert both(sandbox, "my-tool") == ("lie\n", "lie\n", ())

    def test_the_top_level_links(self, sandbox):
        if not Path("/bin").is_symlink():
            pytest.skip("/bin is a directory here")
        sh(sandbox, f"mkdir /app/bin; {LIE} > /app/bin/cat; chmod +x /app/bin/cat; /usr/bin/rm /bin; /usr/bin/ln -s app/bin /bin; true")
        theirs, ours, masked = both(sandbox, "readlink /bin")
        assert (theirs, ours, masked) == ("app/bin\n", f"{Path('/bin').readlink()}\n", ("/bin",))

    @pytest.mark.parametrize(
        "path",
        ["/etc/ld.so.preload", "/etc/ld.so.conf.d/a.conf", "/etc/profile.d/a.sh", "/etc/bash_env", "/etc/python3.99/sitecustomize.py"],
    )
    def test_what_steers_loader_shells_and_interpreters(self, sandbox, path):
        sh(sandbox, f"mkdir -p $(dirname {path}); echo /app/evil.so > {path}")
        theirs, ours, masked = both(sandbox, f"cat {path} 2>/dev/null || echo none")
        assert (theirs, ours, masked) == ("/app/evil.so\n", "none\n", (path,))

    def test_configuration_is_what_tasks_are_about(self, sandbox):
        sh(sandbox, "mkdir /etc/nginx; echo a > /etc/nginx/nginx.conf; echo 'me:x:7:7::/:' >> /etc/passwd; echo b >> /etc/hosts")
        theirs, ours, masked = both(sandbox, "cat /etc/nginx/nginx.conf; tail -n 1 /etc/passwd /etc/hosts")
        assert (theirs == ours, masked) == (True, ())

    @pytest.mark.parametrize(
        ("path", "text", "is_masked"),
        [
            ("/usr/local/lib/python3.99/site-packages/sitecustomize.py", "x", True),
            ("/usr/local/lib/python3.99/site-packages/a.pth", "import os", True),
            ("/usr/local/lib/python3.99/site-packages/a.pth", "/app/src", False),
            ("/usr/local/lib/python3.99/site-packages/package/__init__.py", "x", False),
            ("/root/.local/lib/python3.99/site-packages/usercustomize.py", "x", True),
            ("/root/.local/lib/python3.99/site-packages/b.pth", "import os\\n", True),
            ("/root/.local/lib/python3.99/site-packages/package.py", "x", False),
            ("/root/.gitconfig", "[alias]", True),
            ("/root/.config/git", "x", True),
            ("/root/.config/sqlite3", "x", True),
            ("/root/.sqliterc", ".load x", True),
            ("/root/.bashrc", "alias a=b", False),
            ("/root/.config/app", "x", False),
            ("/usr/lib/glibc-hwcaps/x86-64-v2/{library}", "x", True),
            ("/usr/local/lib/{library}", "x", True),
            ("/usr/local/lib/libnew.so.1", "x", False),
            ("/usr/local/lib/python3.99/site-packages/package/{library}", "x", False),
        ],
    )
    def test_new_files_by_what_they_do(self, sandbox, path, text, is_masked):
        library = sh(sandbox, "find /usr/lib /usr/lib64 -maxdepth 2 -name 'libc.so.*' 2>/dev/null | head -n 1").strip().rpartition("/")[2]
        path = path.format(library=library or pytest.skip("no shared C library here"))
        sh(sandbox, f"mkdir -p $(dirname {path}); printf {shlex.quote(text)} > {path}")
        theirs, ours, masked = both(sandbox, f"test -e {path} && echo there || echo none")
        assert (theirs, ours, masked) == ("there\n", "none\n" if is_masked else "there\n", (path,) if is_masked else ())

    def test_pth_files_that_are_no_files(self, sandbox):
        packages = "/usr/local/lib/python3.99/site-packages"
        sh(sandbox, f"mkdir -p {packages}; mkfifo {packages}/a.pth; ln -s /etc/passwd {packages}/b.pth")
        assert look(sandbox, "true")[1] == (f"{packages}/a.pth", f"{packages}/b.pth")


@AS_ROOT_ONLY
def test_modules_of_the_base_systems_python(sandbox):
    found = sh(sandbox, "find /usr/lib /usr/local/lib -maxdepth 2 -path '*/python3*/glob.py' | head -n 1").strip()
    if not found:
        pytest.skip("the base system has no Python library")
    library = found.removesuffix("/glob.py")
    sh(sandbox, f"touch {library}/glob.cpython-311-x86_64-linux-gnu.so; mkdir {library}/glob; echo x > {library}/new_module.py")
    sh(sandbox, f"mkdir -p {library}/__pycache__; echo x > {library}/__pycache__/glob.cpython-399.pyc")
    sh(sandbox, f"for cache in {library}/__pycache__/*.pyc; do echo x > $cache; done")
    theirs, ours, masked = both(
        sandbox, f"ls -d {library}/glob* {library}/new_module.py {library}/__pycache__/glob.cpython-399.pyc | wc -l"
    )
    assert (theirs, ours) == ("4\n", "2\n")  # the compiled copy is missing from both: it is only a cache
    assert masked == (f"{library}/glob", f"{library}/glob.cpython-311-x86_64-linux-gnu.so")


@AS_ROOT_ONLY
def test_what_a_task_declares_writable_stays(sandbox):
    sh(sandbox, f"mkdir -p /usr/local/bin; {LIE} > /usr/local/bin/cat; rm /usr/bin/nohup; echo x > /etc/ld.so.preload.d")
    writable = ("/usr/local/", "/bin/nohup" if Path("/bin").is_symlink() else "/usr/bin/nohup")
    assert look(sandbox, "true", writable=writable)[1] == ()
    assert look(sandbox, "true", writable=("/usr/local/bin/ca",))[1] == ("/usr/bin/nohup", "/usr/local/bin/cat")


def test_links_of_the_agent_lead_nowhere(sandbox, tmp_path):
    """What it plants is looked at from outside its root: no link may be followed there."""
    (tmp_path / "cat").write_text("x")
    sh(sandbox, f"rm -rf /usr/local/bin; ln -s {tmp_path} /usr/local/bin; ln -s {tmp_path} /root/.local; ln -s {tmp_path} /root/.config")
    assert set(look(sandbox, "true")[1]) - {"/usr/local/bin"} == {"/root/.local", "/root/.config"}
    assert look(sandbox, "ls /root/.local /usr/local/bin", restored=True)[0].count("cat") <= 1


@AS_ROOT_ONLY
@pytest.mark.usefixtures("stores")
def test_files_of_the_tasks_own_image_are_the_agents_to_change(tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:12\nCOPY tool /usr/local/bin/tool\nRUN rm /usr/bin/nohup && echo built > /usr/bin/env2\n"
    )
    (tmp_path / "tool").write_text("#!/bin/sh\necho broken\n")
    with LocalSandbox(SandboxSpec(image=ImageSource(tmp_path))) as box:
        sh(box, "printf '#!/bin/sh\\necho mended\\n' > /usr/local/bin/tool; chmod +x /usr/local/bin/tool")
        assert both(box, "tool; test -e /usr/bin/nohup || echo gone") == ("mended\ngone\n", "mended\ngone\n", ())
        sh(box, f"{LIE} > /usr/bin/nohup; {LIE} > /usr/local/bin/cat; chmod +x /usr/local/bin/cat; echo true > /app/x")
        theirs, ours, masked = both(box, "cat /app/x; test -e /usr/bin/nohup && echo back")
        assert (theirs, ours, masked) == ("lie\nback\n", "true\n", ("/usr/bin/nohup", "/usr/local/bin/cat"))
        sh(box, "rm -r /usr/share/zoneinfo")
        assert both(box, "ls -d /usr/share/zoneinfo 2>/dev/null")[1] == "/usr/share/zoneinfo\n"


# ------------------------------------------------------------------------------------------------------------------------------ live
PYTHON_SERVER = """
import socket, sys
server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 8123)); server.listen(); open("/app/ready", "w").close()
while True:
    client, _ = server.accept(); open("/app/asked", "w").close(); client.sendall(b"hello"); client.close()
"""


def has_python(box: LocalSandbox) -> bool:
    return box.run(["python3", "-c", "import socket"]).exit_code == 0


def test_a_live_clone_reaches_the_agents_server_and_not_its_files(sandbox):
    if not has_python(sandbox):
        pytest.skip("no Python in the sandbox")
    sandbox.put(PYTHON_SERVER.encode(), "/root/server.py")
    server = sandbox.spawn(["python3", "/root/server.py"])
    sh(sandbox, "until test -e /app/ready; do sleep 0.02; done; rm /app/ready")
    client = "exec 3<>/dev/tcp/127.0.0.1/8123; cat <&3; echo; test -e /app/asked && echo seen || echo unseen; echo x > /app/x"
    payload = {"argv": ["bash", "-c", client]}
    result = sandbox.run_in_clone(EXECUTE, payload, view=CloneView(live=True))
    assert (result.error, result.payload["stdout"]) == (None, "hello\nunseen\n")
    assert sh(sandbox, "ls /app") == "asked\n"
    assert server.poll() is None
    apart = sandbox.run_in_clone(EXECUTE, payload, view=CloneView())
    assert apart.payload["exit_code"] == 0
    assert "hello" not in apart.payload["stdout"]
    server.kill()


def test_a_live_clone_that_fails_or_hangs_leaves_the_agent_running(sandbox):
    ticker = sandbox.spawn(["bash", "-c", "while sleep 0.02; do echo x >> /app/ticks; done"])
    failed = sandbox.run_in_clone("t1_env.sandbox.probe:fail", None, view=CloneView(live=True))
    assert failed.error is not None
    hung = sandbox.run_in_clone(EXECUTE, {"argv": ["sleep", "1000"]}, timeout_s=1.0, view=CloneView(live=True))
    assert "ran out of time" in str(hung.error)
    before = sh(sandbox, "wc -l < /app/ticks")
    sh(sandbox, f"until [ $(wc -l < /app/ticks) -gt {int(before)} ]; do sleep 0.02; done")
    ticker.kill()


def test_a_live_clone_has_processes_of_its_own(sandbox):
    agent = sandbox.spawn(["sleep", "1000"])
    listing = sandbox.run_in_clone(EXECUTE, {"argv": ["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]}, view=CloneView(live=True))
    assert "1000" not in listing.payload["stdout"]
    agent.kill()
