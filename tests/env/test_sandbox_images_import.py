"""Imported root filesystems: archives of every kind, hostile ones, and sandboxes over what was imported."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from t1_env.cli.main import main
from t1_env.errors import ConfigError, ImageBuildError
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.images import ImageError, ImageStore, normalise
from t1_env.sandbox.imports import import_image
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

AS_ROOT = os.getuid() == 0


@pytest.fixture(autouse=True)
def _own_stores(stores):
    return stores


@pytest.fixture(scope="module")
def _namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


def tar(*entries, mode: str = "w", path: Path | None = None, layout=tarfile.PAX_FORMAT) -> bytes:
    """An archive of ``(name, kind, content or target, attributes)`` entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=layout) as archive:
        for name, kind, content, *rest in entries:
            member = tarfile.TarInfo(name)
            member.mode = 0o755 if kind == "d" else 0o644
            member.mtime = 1_000_000_000
            for key, value in (rest[0] if rest else {}).items():
                setattr(member, key, value)
            member.type = {
                "f": tarfile.REGTYPE,
                "d": tarfile.DIRTYPE,
                "l": tarfile.SYMTYPE,
                "h": tarfile.LNKTYPE,
                "p": tarfile.FIFOTYPE,
            }.get(kind, tarfile.CHRTYPE)
            if kind in ("l", "h"):
                member.linkname = content
            data = content.encode() if kind == "f" else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    if path is not None:
        path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


ROOT = (
    ("./", "d", ""),
    ("./etc/", "d", ""),
    ("./etc/passwd", "f", "root:x:0:0:root:/root:/bin/bash\n"),
    ("./etc/shadow", "f", "secret", {"mode": 0o600}),
    ("./usr/bin/tool", "f", "#!tool", {"mode": 0o4755}),
    ("./usr/bin/same", "h", "./usr/bin/tool"),
    ("./bin", "l", "usr/bin"),
    ("./usr/lib", "d", ""),
    ("./lib", "l", "usr/lib"),
    ("./lib/inside-a-link", "f", "through"),
    ("./tmp", "d", "", {"mode": 0o1777}),
    ("./pipe", "p", ""),
    ("./dev/null", "c", ""),
    ("./closed", "d", "", {"mode": 0o000}),
    ("./closed/file", "f", "x", {"mode": 0o000}),
    ("./etc/passwd", "f", "root:x:0:0:replaced:/root:/bin/sh\n"),
)


def survey(root: str) -> list[str]:
    """Everything below a directory, as text."""
    found = []
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else ""
            times = "" if path.is_dir() else int(status.st_mtime)  # directories that no archive names get the time of unpacking
            found.append(f"{path.relative_to(root)} {status.st_mode:o} {times} {content!r}")
    return sorted(found)


# ----------------------------------------------------------------------------------------------------------------------- importing
@pytest.mark.skipif(not AS_ROOT, reason="looks at files that are closed to their owner")
def test_an_archive_is_unpacked_exactly(tmp_path):
    tar(*ROOT, path=tmp_path / "root.tar")
    image = import_image(tmp_path / "root.tar", "mine:1.0")
    root = Path(image.rootfs)
    assert (root / "etc" / "passwd").read_text() == "root:x:0:0:replaced:/root:/bin/sh\n"
    assert [oct(path.lstat().st_mode) for path in (root / "etc/shadow", root / "usr/bin/tool", root / "tmp", root / "closed")] == [
        "0o100600",
        "0o104755",
        "0o41777",
        "0o40000",
    ]
    assert (root / "usr/bin/same").samefile(root / "usr/bin/tool")
    assert (root / "bin").readlink() == Path("usr/bin")
    assert (root / "usr/lib/inside-a-link").read_text() == "through"
    assert not (root / "dev/null").exists()
    assert (root / "usr/bin/tool").stat().st_mtime == 1_000_000_000
    assert image.notes == ("left out: 1 device nodes or sockets (a sandbox has its own)",)
    assert (image.names, image.entries) == (("mine:1.0",), sum(len(names) + len(files) for _, names, files in os.walk(root)))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz", "tar.bz2", "tar.zst", "dir", "gnu", "ustar"])
def test_the_same_contents_are_the_same_image_however_they_come(tmp_path, suffix):
    plain = tar(*ROOT)
    (tmp_path / "plain.tar").write_bytes(plain)
    first = import_image(tmp_path / "plain.tar")
    source = tmp_path / f"again.{suffix}"
    if suffix == "tar.zst":
        if shutil.which("zstd") is None:
            pytest.skip("the program zstd is not installed")
        subprocess.run(["zstd", "-q", "-o", str(source)], input=plain, check=True)
    elif suffix == "dir":
        source = Path(first.rootfs)
    elif suffix in ("gnu", "ustar"):
        tar(*ROOT, path=source, layout=tarfile.GNU_FORMAT if suffix == "gnu" else tarfile.USTAR_FORMAT)
    else:
        pack = {"tar": bytes, "tar.gz": gzip.compress, "tar.xz": lzma.compress, "tar.bz2": bz2.compress}[suffix]
        source.write_bytes(pack(plain))
    second = import_image(source, "again")
    assert second.digest == first.digest
    assert set(second.names) == {"again:latest", "plain:latest"}
    assert len(ImageStore().all()) == 1


@pytest.mark.parametrize(
    "entries",
    [
        [("../escaped", "f", "x")],
        [("a/../../escaped", "f", "x")],
        [("link", "l", "{outside}"), ("link/escaped", "f", "x")],
        [("link", "l", "/"), ("link{outside}/escaped", "f", "x")],
        [("up", "l", "../../../../../../../.."), ("up{outside}/escaped", "f", "x")],
        [("link", "l", "{outside}/escaped"), ("link", "f", "x")],
        [("{outside}/escaped", "f", "x")],
        [("hard", "h", "{outside}/victim"), ("hard", "f", "overwritten")],
        [("hard", "h", "../../../../victim")],
        [("link", "l", "{outside}/victim"), ("hard", "h", "link"), ("hard", "f", "overwritten")],
        [("dir", "d", ""), ("dir", "l", "{outside}"), ("dir/escaped", "f", "x")],
        [("proc", "l", "/proc/self/root{outside}"), ("proc/escaped", "f", "x")],
    ],
)
def test_nothing_in_an_archive_leads_out(tmp_path, entries):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("untouched")
    filled = [tuple(part.replace("{outside}", str(outside)) if isinstance(part, str) else part for part in entry) for entry in entries]
    tar(("usr", "d", ""), *filled, path=tmp_path / "evil.tar")
    try:
        image = import_image(tmp_path / "evil.tar")
    except ImageError:
        image = None
    assert sorted(path.name for path in outside.iterdir()) == ["victim"]
    assert (outside / "victim").read_text() == "untouched"
    assert (outside / "victim").stat().st_nlink == 1
    if image is not None:
        assert Path(image.rootfs).is_dir()


def test_overlay_marks_and_dangerous_attributes_do_not_come_in(tmp_path):
    attributes = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.overlay.redirect": "/etc", "SCHILY.xattr.user.note": "kept"}
    tar(("usr", "d", "", {"pax_headers": attributes}), ("file", "f", "x", {"pax_headers": attributes}), path=tmp_path / "root.tar")
    root = import_image(tmp_path / "root.tar").rootfs
    for name in ("usr", "file"):
        assert [each for each in os.listxattr(f"{root}/{name}") if each.startswith("user.overlay")] == []


@pytest.mark.parametrize("kind", ["empty", "garbage", "cut", "cut gzip", "flipped gzip", "cut zst", "missing", "unreadable name"])
def test_damaged_archives_leave_nothing(tmp_path, stores, kind):
    data = tar(("usr", "d", ""), ("usr/file", "f", "x" * 100_000))
    source = tmp_path / "root.tar"
    if kind == "empty":
        data = b""
    elif kind == "garbage":
        data = os.urandom(50_000)
    elif kind == "cut":
        data = data[:50_000]
    elif kind == "cut gzip":
        data = gzip.compress(os.urandom(1000) + data)[:500]
    elif kind == "flipped gzip":
        packed = bytearray(gzip.compress(tar(("usr/file", "f", os.urandom(50_000).hex()))))
        packed[len(packed) // 2] ^= 0xFF
        data = bytes(packed)
    elif kind == "cut zst":
        if shutil.which("zstd") is None:
            pytest.skip("the program zstd is not installed")
        data = subprocess.run(
            ["zstd", "-q"], input=tar(("usr/file", "f", os.urandom(50_000).hex())), check=True, capture_output=True
        ).stdout
        data = data[: len(data) // 2]
    elif kind == "unreadable name":
        data = tar(("usr", "d", ""), ("n" * 300, "f", "x"))
    if kind != "missing":
        source.write_bytes(data)
    with pytest.raises(ImageError, match=r"root\.tar"):
        import_image(source)
    assert ImageStore().all() == []
    assert list(stores.data.glob("images/rootfs/*")) == list(stores.data.glob("images/rootfs/.*")) == []


def test_a_killed_import_is_cleaned_up_by_the_next(tmp_path, stores):
    fifo = tmp_path / "slow.tar"
    os.mkfifo(fifo)
    code = f"from t1_env.sandbox.imports import import_image; import pathlib; import_image(pathlib.Path({str(fifo)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    with fifo.open("wb") as writer:
        writer.write(tar(("usr", "d", ""), ("usr/file", "f", "x" * 100_000))[:60_000])
        writer.flush()
        deadline = time.monotonic() + 60
        while not list(stores.data.glob("images/rootfs/.new-*/fs/usr/file")) and time.monotonic() < deadline:
            time.sleep(0.02)
        half_made = list(stores.data.glob("images/rootfs/.new-*"))
        assert len(half_made) == 1
        tar(("usr", "d", ""), path=tmp_path / "other.tar")
        import_image(tmp_path / "other.tar")
        assert half_made[0].exists()  # it still runs
        process.send_signal(signal.SIGKILL)
        process.wait()
    import_image(tmp_path / "other.tar")
    assert list(stores.data.glob("images/rootfs/.new-*")) == []


def test_imports_at_the_same_time_do_no_harm(tmp_path):
    tar(*ROOT, path=tmp_path / "root.tar")
    with ThreadPoolExecutor(6) as pool:
        images = list(pool.map(lambda index: import_image(tmp_path / "root.tar", f"name-{index}"), range(6)))
    assert len({image.digest for image in images}) == 1
    (only,) = ImageStore().all()
    assert only.names == tuple(f"name-{index}:latest" for index in range(6))


def test_large_and_sparse_files(tmp_path):
    directory = tmp_path / "tree"
    (directory / "usr").mkdir(parents=True)
    with (directory / "usr" / "sparse").open("wb") as stream:
        stream.seek(3 << 30)
        stream.write(b"end")
    if subprocess.run(["tar", "-C", str(directory), "-Scf", str(tmp_path / "sparse.tar"), "."], check=False).returncode != 0:
        pytest.skip("this tar cannot pack sparse files")
    image = import_image(tmp_path / "sparse.tar")
    status = Path(image.rootfs, "usr", "sparse").stat()
    assert status.st_size == (3 << 30) + 3
    assert status.st_blocks * 512 < 64 << 20
    assert import_image(directory).digest == image.digest


@pytest.mark.skipif(not AS_ROOT, reason="only root can give files away")
def test_owners_are_kept_where_root_imports(tmp_path):
    tar(("usr", "d", "", {"uid": 5, "gid": 6}), ("usr/far", "f", "x", {"uid": 1_000_000, "gid": 7}), path=tmp_path / "root.tar")
    image = import_image(tmp_path / "root.tar")
    status, far = Path(image.rootfs, "usr").stat(), Path(image.rootfs, "usr", "far").stat()
    assert (status.st_uid, status.st_gid, far.st_uid, far.st_gid) == (5, 6, 65534, 7)
    assert image.notes == ("given to nobody: 1 files of users above 65535",)


# -------------------------------------------------------------------------------------------------------------------- saved images
LAYERS = (
    tar(
        ("usr/", "d", ""),
        ("usr/a", "f", "1"),
        ("usr/gone", "f", "x"),
        ("opt/dir/old", "f", "x"),
        ("opt/dir/kept", "f", "x"),
        ("etc/x", "f", "x"),
    ),
    tar(
        ("usr/.wh.gone", "f", ""),
        ("opt/dir/.wh..wh..opq", "f", ""),
        ("opt/dir/new", "f", "n"),
        ("usr/a", "f", "22"),
        ("etc/.wh.x", "f", ""),
    ),
    tar(("opt/.wh.nothing", "f", ""), ("opt/dir/early", "f", "e"), ("opt/dir/.wh..wh..opq", "f", ""), ("usr/a", "h", "opt/dir/early")),
)
FLAT = {"usr/a": "e", "opt/dir/early": "e"}


def saved(layers=LAYERS, *, layout: str = "docker", names=("shop:2",), config=None, compress: bool = False) -> bytes:
    """What ``docker save`` (or another engine, in the OCI layout) writes."""
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    blobs = [gzip.compress(layer) if compress else layer for layer in layers]
    image = json.dumps({"config": config or {}, "rootfs": {"type": "layers", "diff_ids": digests}}).encode()
    if layout == "docker":
        files = {f"{index}/layer.tar": blob for index, blob in enumerate(blobs)}
        files["config.json"] = image
        manifest = [{"Config": "config.json", "RepoTags": list(names), "Layers": [f"{index}/layer.tar" for index in range(len(blobs))]}]
        files["manifest.json"] = json.dumps(manifest).encode()
    else:
        files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

        def blob(data: bytes) -> dict[str, str]:
            digest = hashlib.sha256(data).hexdigest()
            files[f"blobs/sha256/{digest}"] = data
            return {"digest": f"sha256:{digest}"}

        manifest = {"config": blob(image), "layers": [blob(each) for each in blobs]}
        entry = {**blob(json.dumps(manifest).encode()), "annotations": {"org.opencontainers.image.ref.name": names[0]}}
        files["index.json"] = json.dumps({"manifests": [entry]}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("layout", ["docker", "oci"])
@pytest.mark.parametrize("compress", [False, True])
def test_saved_images_are_flattened(tmp_path, layout, compress):
    config = {"Env": ["PATH=/x:/usr/bin", "A=1"], "WorkingDir": "/work", "User": "0"}
    (tmp_path / "saved.tar").write_bytes(saved(layout=layout, compress=compress, config=config))
    image = import_image(tmp_path / "saved.tar")
    root = Path(image.rootfs)
    assert {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()} == FLAT
    assert (root / "etc").is_dir()
    assert image.names == ("shop:2",)
    assert (dict(image.env), image.workdir, image.user, image.account) == ({"PATH": "/x:/usr/bin", "A": "1"}, "/work", "0", None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda data: data.replace(b"sha256:" + hashlib.sha256(LAYERS[1]).hexdigest().encode(), b"sha256:" + b"0" * 64),
            "damaged: its digest",
        ),
        (lambda data: data.replace(b"1/layer.tar", b"../../x.tar"), "bad checksum"),
        (lambda data: data.replace(b'"1/layer.tar', b'"../../x.tar'), "is not in it"),
        (lambda data: data.replace(b'"diff_ids": [', b'"diff_idz": ['), "3 layers, but digests for 0"),
        (lambda data: data.replace(b'[{"Config"', b'{{"Config"'), "not JSON"),
    ],
)
def test_damaged_saved_images_are_refused(tmp_path, spoil, message):
    data = spoil(saved())
    (tmp_path / "saved.tar").write_bytes(data)
    with pytest.raises(ImageError, match=message):
        import_image(tmp_path / "saved.tar")
    assert ImageStore().all() == []


@pytest.mark.docker
def test_what_an_engine_saves_is_what_it_exports(tmp_path, docker_image):
    import docker

    client = docker.from_env()
    try:
        container = client.containers.create(docker_image, ["true"])
        try:
            (tmp_path / "export.tar").write_bytes(b"".join(container.export()))
        finally:
            container.remove()
        (tmp_path / "save.tar").write_bytes(b"".join(client.images.get(docker_image).save(named=True)))
    finally:
        client.close()
    exported, kept = import_image(tmp_path / "export.tar", "exported"), import_image(tmp_path / "save.tar")
    assert normalise(docker_image) in kept.names
    made_by_the_engine = ("dev", "proc", "sys", "etc", ".dockerenv")
    left, right = ([line for line in survey(i.rootfs) if not line.split(" ")[0].startswith(made_by_the_engine)] for i in (exported, kept))
    assert left == right


# -------------------------------------------------------------------------------------------------------------------------- names
def test_names_are_kept_apart_by_tag_and_removed_one_by_one(tmp_path):
    tar(("usr", "d", ""), path=tmp_path / "one.tar")
    tar(("usr", "d", ""), ("opt", "d", ""), path=tmp_path / "two.tar")
    store = ImageStore()
    one = import_image(tmp_path / "one.tar", "debian:bookworm")
    two = import_image(tmp_path / "two.tar", "registry.example.org:5000/team/debian:bookworm")
    assert store.get("docker.io/library/debian:bookworm").digest == one.digest
    assert store.get("registry.example.org:5000/team/debian:bookworm").digest == two.digest
    assert store.get("debian") is None
    import_image(tmp_path / "two.tar", "debian:bookworm")  # the name moves on
    assert store.get("debian:bookworm").digest == two.digest
    assert store.remove("debian:bookworm") == (two.digest, False)
    assert store.get(two.digest) is not None
    assert store.remove(one.digest) == (one.digest, True)
    assert [image.digest for image in store.all()] == [two.digest]
    with pytest.raises(ImageError, match="no image 'debian:bookworm'"):
        store.remove("debian:bookworm")


@pytest.mark.parametrize("name", ["", "Upper", "a b", "../x", "a::b", "-x", "a:", "a/../b", "a@b", "\N{SNOWMAN}"])
def test_bad_names_are_refused(tmp_path, name):
    tar(("usr", "d", ""), path=tmp_path / "root.tar")
    with pytest.raises(ConfigError, match="not an image name"):
        import_image(tmp_path / "root.tar", name)
    assert ImageStore().all() == []


def test_the_map_decides_before_names_and_the_host(tmp_path):
    tar(("usr", "d", ""), path=tmp_path / "root.tar")
    image = import_image(tmp_path / "root.tar", "mine")
    store = ImageStore()
    assert store.find("python:3.12").image is None
    assert "no image python:3.12 was imported" in store.find("python:3.12").said
    store.set_map("python:3.*", "mine")
    store.set_map("mine:*", "host")
    store.set_map("*", "refuse")
    assert store.find("python:3.12").image.digest == image.digest
    assert store.find("mine").image is None
    assert store.find("ubuntu:24.04") is None
    store.set_map("*", None)
    assert store.find("ubuntu:24.04").image is None
    with pytest.raises(ConfigError, match="no entry '\\*'"):
        store.set_map("*", None)
    store.remove("mine")
    with pytest.raises(ImageError, match=r"python:3\.\* = mine:latest, but no image"):
        store.find("python:3.12")


# ------------------------------------------------------------------------------------------------------- sandboxes over an image
@pytest.fixture
def mini(tmp_path, _namespaces, docker_image_archive):
    """An image that can be played in: the host's own bash and tools."""
    (tmp_path / "mini.tar").write_bytes(docker_image_archive)
    return import_image(tmp_path / "mini.tar", "mini:1")


def sh(box, script: str) -> str:
    result = box.run(["bash", "-c", script], timeout_s=120)
    assert result.exit_code == 0, result
    return result.stdout.decode()


@pytest.mark.namespaces
def test_a_sandbox_over_an_image_holds_that_and_nothing_of_the_host(mini, tmp_path):
    host_only = next(path for path in Path("/usr/share").iterdir() if not Path(mini.rootfs, "usr/share", path.name).exists())
    with LocalSandbox(SandboxSpec(image=ImageSource(docker_image="mini:1"), hostname="box", workdir="/work")) as box:
        assert box.built.base == "mini:1 (imported)"
        assert sh(box, "pwd; hostname; cat /etc/hostname; head -n1 /etc/hosts; id -u; stat -c %a /tmp /dev/shm") == (
            "/work\nbox\nbox\n127.0.0.1\tlocalhost box\n0\n1777\n1777\n"
        )
        assert box.run(["test", "-e", str(host_only)]).exit_code == 1
        assert box.run(["test", "-e", str(tmp_path)]).exit_code == 1
        sh(box, "echo x > /usr/new; echo y > /new; rm /usr/bin/stat; echo z > /dev/shm/z; echo > /dev/null")
        assert not Path(mini.rootfs, "new").exists()
        assert Path(mini.rootfs, "usr/bin/stat").exists()
        assert set(box.system_changes()) == {"/usr/bin/stat"}
        before = box.generation()
        result = box.run_in_clone(
            "t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", "cat /usr/new /new /tests/mini.tar | wc -c; echo > /new; rm /usr/new"]},
            mounts={"/tests": tmp_path},
        )  # fmt: skip
        assert int(result.payload["stdout"]) > 1000
        assert box.generation() == before
        with box.fork() as fork:
            assert sh(fork, "cat /usr/new /new /dev/shm/z; test ! -e /usr/bin/stat; echo gone > /new") == "x\ny\nz\n"
        assert sh(box, "cat /new") == "y\n"


@pytest.mark.namespaces
def test_dockerfiles_over_an_image(mini, tmp_path):
    context = tmp_path / "environment"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM docker.io/library/mini:1\nRUN rm -r /usr/bin/cat && echo built > /built\nWORKDIR /srv\n")
    with LocalSandbox(SandboxSpec(image=ImageSource(context))) as box:
        assert (box.built.base, box.built.workdir) == ("mini:1 (imported)", "/srv")
        assert sh(box, 'echo "$(< /built)"; test ! -e /usr/bin/cat') == "built\n"
        with pytest.raises(ImageError, match="in use"):
            ImageStore().remove("mini:1")
    ImageStore().set_map("*", "refuse")
    with pytest.raises(ImageBuildError, match=r"Dockerfile:1: FROM docker.io/library/mini:1: no such image was imported"):
        LocalSandbox(SandboxSpec(image=ImageSource(context))).start()
    ImageStore().set_map("*", None)
    assert ImageStore().remove("mini:1")[1]
    with LocalSandbox(SandboxSpec(image=ImageSource(context))) as box:  # now over the host: other layers
        assert "own system directories" in box.built.base
        assert box.run(["test", "-e", "/usr/share"]).exit_code == 0


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_an_images_settings_are_those_of_its_processes(tmp_path, docker_image_archive):
    config = {"Env": ["A=from image", "PATH=/usr/bin:/extra"], "WorkingDir": "/start", "User": "1000:1000" if AS_ROOT else ""}
    (tmp_path / "saved.tar").write_bytes(saved((docker_image_archive,), config=config, names=("configured:1",)))
    import_image(tmp_path / "saved.tar")
    with LocalSandbox(SandboxSpec(image=ImageSource(docker_image="configured:1"))) as box:
        assert (dict(box.built.env), box.built.workdir) == ({"A": "from image", "PATH": "/usr/bin:/extra"}, "/start")
        assert sh(box, "id -u") == ("1000\n" if AS_ROOT else "0\n")
    context = tmp_path / "environment"
    context.mkdir()
    (context / "Dockerfile").write_text('FROM configured:1\nENV PATH=$PATH:/more\nRUN echo "$A $PATH $PWD $(id -u)" > /tmp/seen\n')
    with LocalSandbox(SandboxSpec(image=ImageSource(context))) as box:
        assert sh(box, "cat /tmp/seen") == f"from image /usr/bin:/extra:/more /start {1000 if AS_ROOT else 0}\n"


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_an_image_cannot_make_the_sandbox_mount_elsewhere(tmp_path, docker_image_archive):
    """/dev, /proc and /etc of an image may be links to anywhere."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "mini.tar").write_bytes(docker_image_archive)
    root = tmp_path / "root"
    shutil.copytree(import_image(tmp_path / "mini.tar").rootfs, root, symlinks=True)
    for name in ("dev", "proc", "sys"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).symlink_to(victim)
    import_image(root, "evil")
    with LocalSandbox(SandboxSpec(image=ImageSource(docker_image="evil"))) as box:
        assert sh(box, "stat -c %F /dev /proc /sys; echo > /dev/null; readlink /proc/self > /dev/null && echo fine") == (
            "directory\ndirectory\ndirectory\nfine\n"
        )
    assert list(victim.iterdir()) == []


_ORDINARY = """
import os, pathlib
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.images import ImageStore
from t1_env.sandbox.imports import import_image
from t1_env.sandbox.local import LocalSandbox
image = import_image(pathlib.Path(sys.argv[2]), "mini")
with LocalSandbox(SandboxSpec(image=ImageSource(docker_image="mini"))) as box:
    print(box.run(["bash", "-c", "id -u; rm /usr/bin/cat; echo x > /usr/new; ls /usr/new; stat -c %U /usr"]).stdout.decode())
    print(box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["ls", "/usr/bin/cat"]}).payload["exit_code"])
    with box.fork() as fork:
        print(fork.run(["ls", "/usr/new"]).stdout.decode())
print(ImageStore().remove("mini")[1], os.listdir(image.rootfs.rpartition("/")[0].rpartition("/")[0]))
"""


def test_an_ordinary_user_can_import(ordinary_user, tmp_path_factory, docker_image_archive):
    source = tmp_path_factory.mktemp("open") / "mini.tar"
    source.write_bytes(docker_image_archive)
    readable = Path("/tmp") / f"t1-test-{os.getpid()}.tar"
    shutil.copy(source, readable)
    try:
        readable.chmod(0o644)
        assert ordinary_user(_ORDINARY, str(readable)) == "0\n/usr/new\nroot\n\n2\n/usr/new\n\nTrue []\n"
    finally:
        readable.unlink()


# --------------------------------------------------------------------------------------------------------------------- the command
def test_the_command(tmp_path, capsys):
    tar(("usr", "d", ""), ("usr/file", "f", "x" * 2_500_000), ("dev/sda", "b", ""), path=tmp_path / "my-root.tar.gz", mode="w:gz")
    assert main(["images", "import", str(tmp_path / "my-root.tar.gz")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("my-root:latest  sha256:")
    assert "2 entries, 2.5 MB" in out.replace("3 entries", "2 entries")
    assert "note: left out: 1 device" in out
    assert main(["images", "import", str(tmp_path / "my-root.tar.gz"), "--name", "second:1"]) == 0
    capsys.readouterr()
    assert main(["images", "list"]) == 0
    listed = capsys.readouterr().out
    assert "my-root:latest" in listed
    assert "second:1" in listed
    assert main(["images", "map", "python:*", "second:1"]) == 0
    assert main(["images", "map"]) == 0
    assert capsys.readouterr().out == "python:* = second:1\n"
    assert main(["images", "inspect", "second:1"]) == 0
    assert json.loads(capsys.readouterr().out)["size_bytes"] == 2_500_000
    assert main(["images", "remove", "second:1", "my-root"]) == 0
    assert capsys.readouterr().out.count("removed") == 2
    for mistake in (
        ["images", "remove", "second:1"],
        ["images", "inspect", "nothing"],
        ["images", "import", str(tmp_path / "missing")],
        ["images", "map", "x", "nothing"],
        ["images", "map", "x"],
        ["images", "map", "x", "--remove"],
    ):
        assert main(mistake) == 2
        assert capsys.readouterr().err.count("\n") <= 2
