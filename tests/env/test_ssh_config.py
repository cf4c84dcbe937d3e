"""Configuration of the SSH sandbox: where it is read from, what it refuses, and that secrets stay secret."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import hmac
import pickle
from pathlib import Path

import pytest

from t1_env.errors import ConfigError
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.hostkeys import Verdict, fingerprint, host_names, judge, known_keys
from t1_env.sandbox.ssh.secret import Secret

PASSWORD = "correct horse battery"
FINGERPRINT = "SHA256:" + "A" * 43


# ------------------------------------------------------------------------------------------------------------------------- secrets
def test_a_secret_is_shown_by_nothing_that_shows_objects() -> None:
    config = SshConfig(host="box", password=PASSWORD, passphrase=Secret(PASSWORD))
    shown = [
        repr(config),
        str(config),
        f"{config}",
        f"{config.password:>20}",
        f"{config.password!s}",
        repr(dataclasses.asdict(config)),
        "{}".format(config.password),  # noqa: UP032
    ]
    shown += [repr(vars(type(config.password))), repr(copy.deepcopy(config)), repr(dataclasses.replace(config, port=3))]
    assert not [text for text in shown if PASSWORD in text]
    assert config.password is not None
    assert config.password.reveal() == PASSWORD


def test_a_literal_secret_is_not_pickled_and_the_message_says_what_is() -> None:
    with pytest.raises(ConfigError, match=r"Secret\.from_env") as caught:
        pickle.dumps(SshConfig(host="box", password=PASSWORD))
    assert PASSWORD not in str(caught.value)


def test_a_secret_named_by_its_source_travels_and_is_read_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    for secret in (Secret.from_env("T1_TEST_PASSWORD"), Secret.from_file(path)):
        data = pickle.dumps(SshConfig(host="box", password=secret))
        assert PASSWORD.encode() not in data
        monkeypatch.setenv("T1_TEST_PASSWORD", PASSWORD)
        again = pickle.loads(data)
        assert again.password.reveal() == PASSWORD
        assert again.password == secret
        assert hash(again) == hash(SshConfig(host="box", password=secret))


def test_a_source_that_is_not_there_is_said_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("T1_TEST_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="T1_TEST_PASSWORD"):
        Secret.from_env("T1_TEST_PASSWORD").reveal()
    with pytest.raises(ConfigError, match="no-such-file"):
        Secret.from_file(tmp_path / "no-such-file").reveal()


def test_secrets_compare_by_what_they_are() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret.from_env("a") != Secret("a")
    assert Secret("a") != "a"


# -------------------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "alice@box"}, "user='alice'"),
        ({"host": "box:2222"}, "port=2222"),
        ({"host": "-oProxyCommand=x"}, "host name"),
        ({"host": ""}, "host name"),
        ({"host": "box", "port": 0}, "port=0"),
        ({"host": "box", "port": True}, "port=True"),
        ({"host": "box", "isolation": "namespace"}, "did you mean 'namespaces'"),
        ({"host": "box", "runtime": "complet"}, "did you mean 'complete'"),
        ({"host": "box", "host_fingerprint": "MD5:00:11"}, "ssh-keygen -lf"),
        ({"host": "box", "host_fingerprint": "SHA256:short"}, "43 characters"),
        ({"host": "box", "remote_dir": "relative"}, "remote_dir"),
        ({"host": "box", "remote_dir": "/"}, "remote_dir"),
        ({"host": "box", "remote_dir": "~"}, "remote_dir"),
        ({"host": "box", "remote_dir": "/a b"}, "remote_dir"),
        ({"host": "box", "remote_dir": "/a;b"}, "remote_dir"),
        ({"host": "box", "user": "a\nb"}, "control characters"),
        ({"host": "box", "connect_timeout_s": float("nan")}, "connect_timeout_s"),
        ({"host": "box", "connect_timeout_s": float("inf")}, "connect_timeout_s"),
        ({"host": "box", "agent": "yes"}, "agent"),
        ({"host": "box", "password": 5}, "Secret or a str"),
    ],
)
def test_values_that_cannot_be_used_are_refused_with_what_to_write(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SshConfig(**arguments)  # type: ignore[arg-type]


def test_a_fingerprint_may_be_padded_and_paths_may_be_paths() -> None:
    config = SshConfig(host="box", host_fingerprint=FINGERPRINT + "=", key_file=Path("/keys/one"))  # type: ignore[arg-type]
    assert config.host_fingerprint == FINGERPRINT
    assert config.key_file == "/keys/one"


# -------------------------------------------------------------------------------------------------------------------------- sources
def test_variables_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ssh.toml"
    path.write_text('host = "box"\nport = 2200\nagent = false\nlease_s = 30\npassword_env = "MY_PASSWORD"\n')
    config = SshConfig.load(
        {"T1_SSH_CONFIG": str(path), "T1_SSH_PORT": "2201", "T1_SSH_KEEPALIVE_S": "2.5", "T1_SSH_USER": "alice", "OTHER": "x"}
    )
    assert (config.host, config.port, config.user, config.agent, config.lease_s, config.keepalive_s) == (
        "box",
        2201,
        "alice",
        False,
        30,
        2.5,
    )
    assert config.password == Secret.from_env("MY_PASSWORD")


def test_the_default_file_is_read_and_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="T1_SSH_HOST"):
        SshConfig.load({})
    (tmp_path / ".config/t1").mkdir(parents=True)
    (tmp_path / ".config/t1/ssh.toml").write_text('host = "box"\n')
    assert SshConfig.load({}).host == "box"
    assert SshConfig.load({"T1_SSH_AGENT": "no"}).agent is False


@pytest.mark.parametrize(
    ("text", "variables", "message"),
    [
        ('hosst = "box"', {}, "did you mean 'host'"),
        ("host = box", {}, "not TOML"),
        ('host = "box"\npassword = "a"\npassword_env = "b"', {}, "both given"),
        ('host = "box"', {"T1_SSH_PROT": "1"}, "did you mean T1_SSH_PORT"),
        ('host = "box"', {"T1_SSH_PORT": "many"}, "expected a number"),
        ('host = "box"', {"T1_SSH_AGENT": "perhaps"}, "true or false"),
    ],
)
def test_mistakes_in_the_sources_are_named(tmp_path: Path, text: str, variables: dict[str, str], message: str) -> None:
    path = tmp_path / "ssh.toml"
    path.write_text(text + "\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        SshConfig.load({"T1_SSH_CONFIG": str(path), **variables})


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        SshConfig.load({"T1_SSH_CONFIG": str(tmp_path / "missing.toml")})


def test_a_password_in_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ssh.toml"
    path.write_text(f'host = "box"\npassword = "{PASSWORD}"\n')
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        SshConfig.load({"T1_SSH_CONFIG": str(path)})
    assert PASSWORD not in str(caught.value)
    path.chmod(0o600)
    password = SshConfig.load({"T1_SSH_CONFIG": str(path)}).password
    assert password is not None
    assert password.reveal() == PASSWORD


def test_a_password_variable_is_kept_by_its_name() -> None:
    config = SshConfig.load({"T1_SSH_HOST": "box", "T1_SSH_PASSWORD": PASSWORD})
    assert config.password == Secret.from_env("T1_SSH_PASSWORD")


# ------------------------------------------------------------------------------------------------------------- OpenSSH's own files
@pytest.fixture
def openssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("paramiko")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh/more").mkdir(parents=True)
    return tmp_path / ".ssh/config"


def test_aliases_of_the_openssh_client_are_understood(openssh: Path) -> None:
    from t1_env.sandbox.ssh.endpoint import resolve

    (openssh.parent / "more/one").write_text("Host far\n  HostName far.example\n  Port 2022\n")
    openssh.write_text(
        "Include more/*\nUser everybody\nHost box\n  HostName box.example\n  User alice\n  Port 2222\n  IdentityFile ~/.ssh/one\n"
        "  IdentitiesOnly yes\n"
        "  UserKnownHostsFile ~/.ssh/hosts\n  HostKeyAlias the-box\nHost *\n  ProxyCommand none\n"
    )
    endpoint = resolve(SshConfig(host="box"))
    assert (endpoint.host, endpoint.port, endpoint.user, endpoint.host_key_name) == ("box.example", 2222, "everybody", "the-box")
    assert endpoint.key_files == (str(openssh.parent / "one"),)
    assert endpoint.known_hosts_files == (str(openssh.parent / "hosts"),)
    assert endpoint.agent_only_named
    assert endpoint.proxy_command is None
    assert resolve(SshConfig(host="far")).address == "everybody@far.example:2022"


def test_what_the_configuration_says_wins_over_openssh(openssh: Path) -> None:
    from t1_env.sandbox.ssh.endpoint import resolve

    openssh.write_text("Host box\n  User alice\n  Port 2222\n  IdentityFile ~/.ssh/one\n")
    endpoint = resolve(SshConfig(host="box", user="bob", port=22, key_file="/keys/two", known_hosts_file="/my hosts"))
    assert (endpoint.user, endpoint.port, endpoint.key_files, endpoint.named_keys) == ("bob", 22, ("/keys/two",), 1)
    assert endpoint.known_hosts_files == ("/my hosts",)
    assert resolve(SshConfig(host="box", user="bob", ssh_config_file="none")).port == 22


def test_jump_hosts_are_followed_in_order(openssh: Path) -> None:
    from t1_env.sandbox.ssh.endpoint import resolve

    openssh.write_text(
        "Host box\n  ProxyJump one,carol@two:2202\nHost one\n  HostName one.example\n  User dora\nHost two\n  HostName two.example\n"
    )
    endpoint = resolve(SshConfig(host="box", user="bob"))
    assert endpoint.jump is not None
    _, last = endpoint.jump
    assert last.address == "carol@two.example:2202"
    assert last.jump is not None
    assert last.jump[1].address == "dora@one.example:22"
    assert last.jump[1].jump is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Host box\n  ProxyJump box\n", "more than 8 hosts"),
        ("Host box\n  ProxyJump :\n", "expected .user@.host"),
        ("Host box\n  Port seven\n", "Port 'seven'"),
        ("Match frobnicate\n  Port 1\n", "cannot be used"),
        ("Include config\n", "includes more than"),
    ],
)
def test_an_openssh_configuration_that_cannot_be_used_is_an_error(openssh: Path, text: str, message: str) -> None:
    from t1_env.sandbox.ssh.endpoint import resolve

    openssh.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(SshConfig(host="box", user="bob"))


# ---------------------------------------------------------------------------------------------------------------------- known hosts
def _line(names: str, blob: bytes, kind: str = "ssh-ed25519", marker: str = "") -> str:
    return f"{marker} {names} {kind} {base64.b64encode(blob).decode()} comment\n".lstrip()


def _hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


OURS, OTHER = b"\0\0\0\x0bssh-ed25519 our key", b"\0\0\0\x0bssh-ed25519 another key"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("", Verdict.UNKNOWN),
        (_line("box", OURS), Verdict.KNOWN),
        (_line("other,BOX", OURS), Verdict.KNOWN),
        (_line("b?x", OURS), Verdict.KNOWN),
        (_line("*,!box", OURS), Verdict.UNKNOWN),
        (_line(_hashed("box"), OURS), Verdict.KNOWN),
        (_line(_hashed("other"), OURS), Verdict.UNKNOWN),
        (_line("box", OTHER), Verdict.CHANGED),
        (_line("box", OTHER) + _line("box", OURS), Verdict.KNOWN),
        (_line("box", OURS) + _line("*", OURS, marker="@revoked"), Verdict.REVOKED),
        (_line("box", OTHER, marker="@revoked"), Verdict.UNKNOWN),
        (_line("box", OURS, marker="@cert-authority"), Verdict.UNKNOWN),
        (_line("[box]:2222", OURS), Verdict.UNKNOWN),
        ("# box ssh-ed25519 AAAA\n\nbox ssh-ed25519\nbox ssh-ed25519 !!!\n|1|x box AAAA\n|1|@@|@@ ssh-ed25519 AAAA\n", Verdict.UNKNOWN),
    ],
)
def test_known_hosts_lines_say_what_openssh_reads_in_them(tmp_path: Path, lines: str, verdict: Verdict) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(lines)
    assert judge(OURS, known_keys(host_names("Box", 22), [str(path), str(tmp_path / "missing")])).verdict is verdict


def test_other_ports_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(_line("[box]:2222", OURS) + _line("[b*]:23", OURS) + _line("b", OTHER))
    assert judge(OURS, known_keys(host_names("box", 2222), [str(path)])).verdict is Verdict.KNOWN
    assert judge(OURS, known_keys(host_names("box", 23), [str(path)])).verdict is Verdict.KNOWN
    judgement = judge(OTHER, known_keys(host_names("box", 2222), [str(path)]))
    assert judgement.verdict is Verdict.CHANGED
    assert judgement.line is not None
    assert judgement.line.place == f"{path}:1"


def test_a_known_hosts_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        known_keys(("box",), [str(tmp_path)])


def test_fingerprints_look_like_those_of_openssh() -> None:
    assert fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
