"""Images of Docker sandboxes: found, pulled, built by the daemon, and what is said when that fails."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import platform
import re
import tarfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from t1_env.errors import ConfigError, ImageBuildError, SandboxUnavailable
from t1_env.sandbox.base import ImageSource
from t1_env.sandbox.docker import images as docker_images
from t1_env.sandbox.docker.build import content_digest, line_of_instruction, line_of_step, protobuf_fields, replace_bases
from t1_env.sandbox.docker.config import BASE_IMAGE_VARIABLE, IMAGE_VARIABLE, DockerConfig
from t1_env.sandbox.docker.daemon import daemon_for
from t1_env.sandbox.docker.images import find_image

NO_REGISTRY = "127.0.0.1:1"  # nothing listens there, so that no test asks anybody outside this machine


# ------------------------------------------------------------------------------------------------------------- without an engine
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("FROM a\nRUN b\nRUN c\n", [1, 2, 3]),
        ("# comment\n\nFROM a\n# more\nRUN b \\\n  # inside\n\n  && c\nRUN d\n", [3, 5, 9]),
        ("# escape=`\nFROM a\nRUN b `\n c\nRUN d\\\nRUN e\n", [2, 3, 5, 6]),
        ("ARG X=1\nFROM a\n", [1, 2]),
        ("", []),
    ],
)
def test_line_of_step(text, lines):
    assert [line_of_step(text, step) for step in range(1, len(lines) + 1)] == lines
    assert line_of_step(text, 0) is None
    assert line_of_step(text, len(lines) + 1) is None


def test_line_of_instruction():
    text = "FROM a\nRUN  echo one \\\n  two\nRUN <<END\necho x\nEND\n"
    assert line_of_instruction(text, "RUN echo one   two") == 2
    assert line_of_instruction(text, "RUN <<END (echo...)") is None
    assert line_of_instruction(text, "") is None


def test_protobuf_fields():
    assert list(protobuf_fields(b"\x08\x96\x01\x12\x02hi\x1d\0\0\0\1\x21" + b"\0" * 8)) == [
        (1, 150),
        (2, b"hi"),
        (3, b"\0\0\0\1"),
        (4, b"\0" * 8),
    ]
    with pytest.raises(ValueError, match="kind"):
        list(protobuf_fields(b"\x0b"))
    with pytest.raises(IndexError):
        list(protobuf_fields(b"\x08\x96"))


def test_replace_bases_leaves_stages_and_everything_else_alone():
    text = "ARG V=1\nFROM --platform=linux/amd64 debian:$V AS Build\nRUN echo FROM x\nfrom build as two\nFROM scratch\nFROM ubuntu\n"
    assert replace_bases(text, "mini") == (
        "ARG V=1\nFROM --platform=linux/amd64 mini AS Build\nRUN echo FROM x\nfrom build as two\nFROM scratch\nFROM mini\n"
    )


def test_content_digest_follows_contents_modes_and_names_but_not_times(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("one")
    (tmp_path / "link").symlink_to("sub/file")
    first = content_digest(tmp_path)
    (tmp_path / "sub" / "file").write_text("one")
    assert content_digest(tmp_path) == first
    seen = {first, content_digest(tmp_path, "extra")}
    for change in (
        lambda: (tmp_path / "sub" / "file").write_text("two"),
        lambda: (tmp_path / "sub" / "file").chmod(0o755),
        lambda: (tmp_path / "empty").mkdir(),
        lambda: ((tmp_path / "link").unlink(), (tmp_path / "link").symlink_to("sub")),
    ):
        change()
        seen.add(content_digest(tmp_path))
    assert len(seen) == 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"pull": "always"},
        {"max_concurrent_starts": 0},
        {"start_interval_s": -1.0},
        {"request_timeout_s": float("nan")},
        {"labels": {"t1.owner": "me"}},
    ],
)
def test_a_wrong_setting_is_named(wrong):
    with pytest.raises(ConfigError, match=f"DockerConfig.{next(iter(wrong))}"):
        DockerConfig(**wrong)


@pytest.mark.parametrize("url", ["unix:///no/such/docker.sock", "tcp://127.0.0.1:1", "nonsense"])
def test_a_daemon_that_does_not_answer_is_unavailable_and_the_message_helps(url):
    pytest.importorskip("docker")
    with pytest.raises(SandboxUnavailable) as caught:
        daemon_for(DockerConfig(base_url=url))
    assert url in str(caught.value)
    assert "DOCKER_HOST" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------- with an engine
@pytest.fixture
def daemon(docker_image):
    return daemon_for(DockerConfig(base_image=docker_image, default_image=docker_image, build_network="none"))


@pytest.fixture
def build(daemon, tmp_path):
    """Build a Dockerfile in a directory of its own; every image is removed afterwards."""
    built = []

    def run(text, *, timeout_s=120.0, **others):
        (tmp_path / "Dockerfile").write_text(text)
        for name, content in others.items():
            (tmp_path / name).write_text(content)
        try:
            image = find_image(daemon, ImageSource(environment_dir=tmp_path, build_timeout_s=timeout_s))
        except ImageBuildError as error:
            built.extend(re.findall(r"^ ---> ([0-9a-f]{12})$", str(error), re.MULTILINE)[1:])  # layers of the steps that worked
            raise
        built.append(image.id)
        return image

    yield run
    for name in dict.fromkeys(reversed(built)):
        for _ in range(600):  # the container of a build that was cut off takes a moment to go
            try:
                daemon.api.remove_image(name, force=True)
            except daemon.sdk.errors.NotFound:
                break
            except daemon.sdk.errors.APIError:
                time.sleep(0.1)


@pytest.mark.docker
def test_a_dockerfile_is_built_by_the_daemon_and_its_settings_are_known(daemon, build):
    image = build(
        "FROM debian:bookworm-slim AS first\nRUN echo made >/made\nFROM first\nWORKDIR /srv\nENV A=1 B='two words'\nCOPY note .\n"
        "COPY --from=first /made /made\nVOLUME /data\nUSER user\n",
        note="hello",
    )
    assert image.env["A"] == "1"
    assert image.env["B"] == "two words"
    assert (image.workdir, image.user, image.volumes) == ("/srv", "user", ("/data",))
    assert daemon.api.inspect_image(image.id)["Config"]["Labels"]["t1.kind"] == "task-image"


@pytest.mark.docker
def test_an_unchanged_directory_is_built_once_and_a_changed_one_again(daemon, build, tmp_path, monkeypatch):
    runs = []
    original = docker_images.Build.run
    monkeypatch.setattr(docker_images.Build, "run", lambda self: (runs.append(1), original(self))[1])
    text = f"FROM x\nENV ID={uuid.uuid4().hex}\nCOPY file /file\n"
    first = build(text, file="one")
    source = ImageSource(environment_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        others = list(pool.map(lambda _: find_image(daemon, source), range(8)))
    assert {image.id for image in others} == {first.id}
    assert len(runs) == 1
    changed = build(text, file="two")
    assert changed.id != first.id
    daemon.api.remove_image(changed.id, force=True)
    assert build(text, file="two").id, "an image that somebody removed is built again"
    assert len(runs) == 3


@pytest.mark.docker
def test_threads_that_want_one_image_cause_one_build(daemon, tmp_path, monkeypatch):
    (tmp_path / "Dockerfile").write_text(f"FROM x\nENV ID={uuid.uuid4().hex}\n")
    runs, lock = [], threading.Lock()
    original = docker_images.Build.run

    def counted(self):
        with lock:
            runs.append(1)
        return original(self)

    monkeypatch.setattr(docker_images.Build, "run", counted)
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda _: find_image(daemon, ImageSource(environment_dir=tmp_path)), range(8)))
    daemon.api.remove_image(images[0].id, force=True)
    assert len({image.id for image in images}) == 1
    assert len(runs) == 1


@pytest.mark.docker
@pytest.mark.parametrize(
    ("text", "line", "reasons"),
    [
        ("FROM x\nRUN true \\\n # comment\n && true\nRUN echo loud; exit 3\n", 5, ["code: 3", "loud"]),
        ("FROM x\n\nCOPY missing /x\n", 3, ["missing"]),
        ("FROM x\nNONSENSE\n", 2, ["NONSENSE"]),
    ],
)
def test_a_failed_build_names_the_line_and_the_reason(build, tmp_path, text, line, reasons):
    with pytest.raises(ImageBuildError) as caught:
        build(text)
    assert str(caught.value).startswith(f"{tmp_path / 'Dockerfile'}:{line}: ")
    for reason in reasons:
        assert reason in str(caught.value)


@pytest.mark.docker
def test_what_only_buildkit_understands_is_built_by_it(daemon, build, tmp_path):
    if daemon.info["ServerVersion"].startswith(("17.", "18.", "19.")):
        pytest.skip("this engine has no BuildKit")
    text = f"FROM x\nRUN --mount=type=tmpfs,target=/scratch echo {uuid.uuid4().hex} >/made\nCOPY note /note\n"
    (tmp_path / ".dockerignore").write_text("note-not-this\n*file\n")
    image = build(text, note="hello")
    assert daemon.api.inspect_image(image.id)["Config"]["Labels"]["t1.kind"] == "task-image"
    with pytest.raises(ImageBuildError) as caught:
        build("FROM x\n\nRUN --mount=type=tmpfs,target=/scratch echo loud \\\n && exit 3\n")
    assert str(caught.value).startswith(f"{tmp_path / 'Dockerfile'}:3: ")
    assert "loud" in str(caught.value)


@pytest.mark.docker
@pytest.mark.parametrize("command", ["sleep 1000", "while :; do echo spam; sleep 0.01; done"])
def test_a_build_that_takes_too_long_is_cut_off_and_leaves_no_container(daemon, build, tmp_path, command):
    mark = uuid.uuid4().hex
    with pytest.raises(ImageBuildError) as caught:
        build(f"FROM x\nRUN : {mark}; {command}\n", timeout_s=6.0)
    assert str(caught.value).startswith(f"{tmp_path / 'Dockerfile'}:2: the build ran out of time (6 s)")
    assert ("spam" in str(caught.value).splitlines()[-1]) is ("spam" in command)
    for _ in range(600):
        left = [entry for entry in daemon.api.containers(all=True) if mark in entry["Command"]]
        if not left:
            break
        time.sleep(0.1)
    assert not left


@pytest.mark.docker
def test_a_base_image_that_cannot_be_had_says_what_to_do(docker_image, tmp_path, monkeypatch):
    monkeypatch.delenv(BASE_IMAGE_VARIABLE, raising=False)
    (tmp_path / "Dockerfile").write_text(f"FROM {NO_REGISTRY}/no/such:1\nRUN true\n")
    with pytest.raises(ImageBuildError, match="T1_DOCKER_BASE_IMAGE"):
        find_image(daemon_for(DockerConfig(default_image=docker_image)), ImageSource(environment_dir=tmp_path, build_timeout_s=60))


@pytest.mark.docker
@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        (ImageSource(docker_image=f"{NO_REGISTRY}/no/such:1", build_timeout_s=30), ImageBuildError, "cannot be pulled"),
        (ImageSource(docker_image="Not A Name"), ImageBuildError, "cannot be the name"),
        (ImageSource(environment_dir=docker_images.Path("/no/such/directory")), ImageBuildError, "needs a Dockerfile"),
    ],
)
def test_an_image_that_cannot_be_had_says_why(daemon, source, kind, reason):
    with pytest.raises(kind, match=reason):
        find_image(daemon, source)


def registry_of(layer: bytes) -> tuple[http.server.ThreadingHTTPServer, list[str]]:
    """A registry on a loopback port with one image of one layer, and the list of what it was asked for."""
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": ["FROM_REGISTRY=yes"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    prefix = "application/vnd.docker"
    described = [
        {"mediaType": f"{prefix}.{kind}", "size": len(blob), "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}"}
        for kind, blob in (("container.image.v1+json", config), ("image.rootfs.diff.tar", layer))
    ]
    manifest_type = f"{prefix}.distribution.manifest.v2+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": manifest_type, "config": described[0], "layers": [described[1]]}).encode()
    blobs = {f"sha256:{hashlib.sha256(blob).hexdigest()}": blob for blob in (config, layer, manifest)}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/v2/":
                body, kind = b"{}", "application/json"
            elif "/manifests/" in self.path and ("latest" in self.path or self.path.rsplit("/", 1)[1] in blobs):
                body, kind = manifest, manifest_type
            else:
                body, kind = blobs.get(self.path.rsplit("/", 1)[1], b""), "application/octet-stream"
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(body).hexdigest()}")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler), asked


@pytest.mark.docker
def test_an_image_is_pulled_once_and_only_if_the_daemon_lacks_it(daemon):
    if not daemon.is_local or "127.0.0.0/8" not in daemon.info["RegistryConfig"]["InsecureRegistryCIDRs"]:
        pytest.skip("the daemon does not pull from this machine's loopback")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    server, asked = registry_of(buffer.getvalue())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    name = f"127.0.0.1:{server.server_address[1]}/t1-test/pulled"
    try:
        image = find_image(daemon, ImageSource(docker_image=name))
        assert image.env["FROM_REGISTRY"] == "yes"
        assert asked
        asked.clear()
        assert find_image(daemon, ImageSource(docker_image=name)) == image
        assert not asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        if daemon.api.images(name=name):
            daemon.api.remove_image(name, force=True)


@pytest.mark.docker
def test_pull_never_means_never(docker_image):
    with pytest.raises(ImageBuildError, match="'never'"):
        find_image(daemon_for(DockerConfig(pull="never")), ImageSource(docker_image=f"{NO_REGISTRY}/no/such:1"))


@pytest.mark.docker
def test_without_a_source_the_default_image_is_used(docker_image, monkeypatch):
    monkeypatch.delenv(IMAGE_VARIABLE, raising=False)
    with pytest.raises(SandboxUnavailable, match=IMAGE_VARIABLE):
        find_image(daemon_for(DockerConfig()), None)
    monkeypatch.setenv(IMAGE_VARIABLE, docker_image)
    from_variable = find_image(daemon_for(DockerConfig()), None)
    assert from_variable == find_image(daemon_for(DockerConfig(default_image=docker_image)), None)
    monkeypatch.setenv(IMAGE_VARIABLE, f"{NO_REGISTRY}/no/such:1")
    with pytest.raises(SandboxUnavailable, match="default image"):
        find_image(daemon_for(DockerConfig()), None)


@pytest.mark.docker
def test_a_from_means_what_it_says_unless_an_image_stands_in(docker_image, tmp_path, monkeypatch):
    monkeypatch.delenv(BASE_IMAGE_VARIABLE, raising=False)
    (tmp_path / "Dockerfile").write_text(f"FROM {NO_REGISTRY}/no/such:1\n")
    with pytest.raises(ImageBuildError, match=r"Dockerfile:1: "):
        find_image(daemon_for(DockerConfig()), ImageSource(environment_dir=tmp_path))
    monkeypatch.setenv(BASE_IMAGE_VARIABLE, docker_image)
    image = find_image(daemon_for(DockerConfig()), ImageSource(environment_dir=tmp_path))
    daemon_for(DockerConfig()).api.remove_image(image.id, force=True)
