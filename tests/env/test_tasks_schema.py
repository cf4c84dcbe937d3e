"""``task.toml`` and the text files around it: what is accepted, what is refused and how it is said."""

import pytest

from t1_env.errors import TaskError
from t1_env.tasks import TaskWarning
from t1_env.tasks.schema import parse_task_toml
from t1_env.tasks.task import dockerfile_workdir, parse_oracle, parse_slips, strip_canary

FILE = "some/task.toml"

FULL = """\
version = "1.1"
source = "somewhere"
multi_step_reward_strategy = "final"
artifacts = ["/app/out", {source = "/app/x", destination = "x", exclude = ["*.o"], service = "db"}]
[task]
name = "org/name"
version = "2"
description = "d"
authors = [{name = "A", email = "a@example.org"}, {name = "B"}]
keywords = ["k"]
[metadata]
difficulty = "hard"
[metadata.t1]
family = "f"
level = 2
seed = 7
split = "dev"
category = "c"
requires = ["bash", "awk"]
verifier_class = "behaviour"
[agent]
timeout_sec = 900
user = 1000
network_mode = "allowlist"
allowed_hosts = ["*.example.org"]
[verifier]
timeout_sec = 1800.5
env = {A = "1"}
user = "root"
environment_mode = "separate"
[verifier.environment]
docker_image = "x:1"
[[verifier.collect]]
command = "dump"
[environment]
network_mode = "public"
build_timeout_sec = 60
docker_image = "image:1"
cpus = 0.5
memory = "2G"
storage = "10G"
gpus = 0
gpu_types = ["h200"]
tpu = {type = "v5", topology = "2x2"}
env = {KEY = "${KEY:-none}"}
skills_dir = "/skills"
workdir = "/srv"
allow_internet = false
[environment.healthcheck]
command = "true"
retries = 5
[[environment.mcp_servers]]
name = "m"
transport = "stdio"
command = "mcp"
args = ["-v"]
[solution]
env = {B = "2"}
"""


def test_every_field_of_the_format_is_read():
    config, metadata = parse_task_toml(FULL, file=FILE)
    assert config.schema_version == "1.1"
    assert config.task is not None
    assert config.task.authors[0].email == "a@example.org"
    assert config.agent.user == 1000
    assert config.verifier.separate
    assert config.verifier.collect[0].timeout_sec == 60
    assert config.environment.memory_limit_mb == 2048
    assert config.environment.storage_limit_mb == 10240
    assert config.environment.network is False
    assert config.environment.healthcheck is not None
    assert config.environment.healthcheck.interval_sec == 5
    assert config.artifacts[1].service == "db"  # type: ignore[union-attr]
    assert config.metadata["difficulty"] == "hard"
    assert (metadata.family, metadata.level, metadata.seed, metadata.split) == ("f", 2, 7, "dev")
    assert metadata.requires == ("bash", "awk")


def test_defaults_are_those_of_the_format():
    config, metadata = parse_task_toml("", file=FILE)
    assert config.schema_version == "1.4"
    assert config.verifier.timeout_sec == 600
    assert config.agent.timeout_sec is None
    assert config.environment.build_timeout_sec == 600
    assert config.environment.network is True
    assert config.environment.memory_limit_mb is None
    assert not config.verifier.separate
    assert metadata.family is None
    assert metadata.requires == ()


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("", False),
        ('[environment]\nnetwork_mode = "public"\n', True),
        ('[environment]\nnetwork_mode = "no-network"\n', False),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]\n', False),
        ("[environment]\nallow_internet = true\n", True),
        ('[environment]\nallow_internet = false\nnetwork_mode = "public"\n', False),
    ],
)
def test_a_task_asks_for_the_network_only_in_so_many_words(text, asks):
    assert parse_task_toml(text, file=FILE)[0].environment.asks_for_network is asks


def test_unknown_keys_warn_with_their_full_names():
    text = 'speed = 1\n[environment]\nflavour = "x"\n[metadata]\nfree = 1\n[metadata.t1]\nlevels = 3\n'
    text += '[[environment.mcp_servers]]\nname = "m"\nport = 1\n'
    with pytest.warns(TaskWarning) as caught:
        parse_task_toml(text, file=FILE)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(FILE)
    for key in ("speed", "environment.flavour", "metadata.t1.levels", "environment.mcp_servers[0].port"):
        assert key in message
    assert "free" not in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("task = ", ["not valid TOML"]),
        ('[verifier]\ntimeout_sec = "soon"\n', ["verifier.timeout_sec", "'soon'", "number"]),
        ("[verifier]\ntimeout_sec = -1\n", ["verifier.timeout_sec", "-1", "greater than 0"]),
        ("[verifier]\ntimeout_sec = nan\n", ["verifier.timeout_sec", "nan", "finite"]),
        ("[agent]\ntimeout_sec = inf\n", ["agent.timeout_sec", "inf", "finite"]),
        ("[environment]\ncpus = [1]\n", ["environment.cpus", "[1]"]),
        ("environment = 3\n", ["environment", "3"]),
        ('[environment]\nmemory = "lots"\n', ["environment.memory", "'lots'", "'2G'"]),
        ('[environment]\nworkdir = "app"\n', ["workdir", "absolute"]),
        ('[environment]\nnetwork_mode = "off"\n', ["environment.network_mode", "'off'", "no-network"]),
        ('[agent]\nallowed_hosts = ["a"]\n', ["allowed_hosts", "allowlist"]),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\nos = "linux"\n', ["exclude each other"]),
        ('[task]\nname = "no slash"\n', ["task.name", "'no slash'"]),
        ("[task]\n", ["task.name is missing"]),
        ("[metadata.t1]\nlevel = 0\n", ["metadata.t1.level", "0"]),
        ('[metadata.t1]\nsplit = "val"\n', ["metadata.t1.split", "'val'"]),
        ("[metadata]\nt1 = 5\n", ["metadata.t1", "5"]),
        ('schema_version = "2.0"\n', ["schema_version", "'2.0'", "1.x"]),
        ('[environment]\nos = "' + "x" * 500 + '"\n', ["environment.os", "..."]),
    ],
)
def test_wrong_values_name_file_key_value_and_expectation(text, parts):
    with pytest.raises(TaskError) as caught:
        parse_task_toml(text, file=FILE)
    message = str(caught.value)
    assert message.startswith(FILE)
    assert "\n" not in message
    assert len(message) < 400
    for part in parts:
        assert part in message


def test_all_problems_are_reported_at_once():
    with pytest.raises(TaskError, match=r"agent\.timeout_sec.*environment\.cpus"):
        parse_task_toml("[agent]\ntimeout_sec = 'x'\n[environment]\ncpus = 'y'\n", file=FILE)


class TestOracle:
    def test_steps_start_at_their_markers(self):
        script = "#!/bin/bash\nset -e\n# a comment\n\n# step: one\necho a\n\n# step: two\ncat > f <<'EOF'\n# not a step\nEOF\n"
        assert parse_oracle(script, file="f") == (("one", "echo a"), ("two", "cat > f <<'EOF'\n# not a step\nEOF"))

    def test_code_before_the_first_step_is_not_lost(self):
        assert parse_oracle("#!/bin/bash\nset -e\nexport A=1\n# step: go\necho $A\n", file="f") == (
            ("set up", "export A=1"),
            ("go", "echo $A"),
        )

    def test_a_script_without_steps_is_one_command_in_a_subshell(self):
        ((_, command),) = parse_oracle("#!/bin/bash\nset -e\nexit 3\n", file="f")
        assert command == "(\nset -e\nexit 3\n)"

    def test_an_empty_script_has_no_steps(self):
        assert parse_oracle("#!/bin/bash\n", file="f") == ()

    def test_an_empty_step_is_refused(self):
        with pytest.raises(TaskError, match="'two' holds no command"):
            parse_oracle("# step: one\ntrue\n# step: two\n\n", file="f")


class TestSlips:
    def test_reads_records(self):
        (slip,) = parse_slips('[{"step": 1, "command": "ls", "kind": "k"}]', n_steps=2, file="f")
        assert (slip.step, slip.command, slip.kind) == (1, "ls", "k")

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("[", "not valid JSON"),
            ("{}", "expected a list"),
            ('["ls"]', "slip 0"),
            ('[{"step": 0, "command": "ls"}]', "kind"),
            ('[{"step": 2, "command": "ls", "kind": "k"}]', "from 0 to 1"),
            ('[{"step": -1, "command": "ls", "kind": "k"}]', "from 0 to 1"),
            ('[{"step": true, "command": "ls", "kind": "k"}]', "True"),
            ('[{"step": "0", "command": "ls", "kind": "k"}]', "'0'"),
            ('[{"step": 0, "command": " ", "kind": "k"}]', "non-empty"),
            ('[{"step": 0, "command": 5, "kind": "k"}]', "non-empty"),
        ],
    )
    def test_refuses_anything_else(self, text, part):
        with pytest.raises(TaskError, match="f: ") as caught:
            parse_slips(text, n_steps=2, file="f")
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# the canary GUID 1\n<!-- CANARY -->\n\nDo it.\n", "Do it."),
        ("# A heading\nDo it.\n", "# A heading\nDo it."),
        ("Do it.\n# canary stays here\n", "Do it.\n# canary stays here"),
        ("  \n", ""),
    ],
)
def test_leading_canary_comments_are_taken_off(text, expected):
    assert strip_canary(text) == expected


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM x\n", "/"),
        ("FROM x\nWORKDIR /app\nworkdir src\n", "/app/src"),
        ('FROM x\nWORKDIR "/my app"\n', "/my app"),
        ("FROM x\nWORKDIR\n", "/"),
    ],
)
def test_workdir_of_a_dockerfile(dockerfile, expected):
    assert dockerfile_workdir(dockerfile) == expected
