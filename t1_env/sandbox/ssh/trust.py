"""The decision whether to go on with a server that has shown its key."""

from __future__ import annotations

from typing import Any

from t1_env.errors import SandboxUnavailable
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.endpoint import Endpoint
from t1_env.sandbox.ssh.hostkeys import Judgement, KnownKey, Verdict, fingerprint, host_names, judge, known_keys


def prefer_known_kinds(transport: Any, endpoint: Endpoint) -> None:
    """Ask for a kind of key that the host is known by first, as a server has several and shows one.

    Args:
        transport: A paramiko transport that is not started.
        endpoint: The server.
    """
    options = transport.get_security_options()
    names = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
    kinds = [key.kind for key in _known(endpoint)]
    first = [name for kind in kinds for name in names.get(kind, (kind,)) if name in options.key_types]
    if first:
        options.key_types = tuple(dict.fromkeys((*first, *options.key_types)))


def check_host(key: Any, config: SshConfig, endpoint: Endpoint) -> None:
    """Refuse a server that is not known to be the right one.

    Args:
        key: The key that it has shown and proved to own.
        config: A fingerprint in it decides alone.
        endpoint: The server.

    Raises:
        SandboxUnavailable: The key is unknown, another than the known one, or revoked.
    """
    blob: bytes = key.asbytes()
    seen = f"{endpoint.host} port {endpoint.port} shows the {key.get_name()} host key {fingerprint(blob)}"
    if config.host_fingerprint is not None:
        if fingerprint(blob) != config.host_fingerprint:
            raise SandboxUnavailable(
                f"HOST KEY REFUSED: {seen}, but host_fingerprint is {config.host_fingerprint}. Either this is another machine, or its key "
                "was changed. Nothing was sent to it. Ask whoever runs the server which fingerprint is right"
            )
        return
    judgement = judge(blob, _known(endpoint))
    if judgement.verdict is Verdict.UNKNOWN and endpoint.port != 22 and not endpoint.host_key_name:
        # Like the OpenSSH client: a key known for the host itself is good on any port of it. Its absence there proves nothing.
        elsewhere = judge(blob, known_keys(host_names(endpoint.host, 22), endpoint.known_hosts_files))
        judgement = elsewhere if elsewhere.verdict in (Verdict.KNOWN, Verdict.REVOKED) else judgement
    if judgement.verdict is not Verdict.KNOWN:
        raise SandboxUnavailable(_refusal(judgement, seen, fingerprint(blob), endpoint))


def _known(endpoint: Endpoint) -> list[KnownKey]:
    names = (endpoint.host_key_name,) if endpoint.host_key_name else host_names(endpoint.host, endpoint.port)
    return known_keys(names, endpoint.known_hosts_files)


def _refusal(judgement: Judgement, seen: str, shown: str, endpoint: Endpoint) -> str:
    line = judgement.line
    if judgement.verdict is Verdict.REVOKED and line is not None:
        return f"HOST KEY REFUSED: {seen}, which {line.place} says is revoked. Nothing was sent to it"
    if line is not None:
        return (
            f"HOST KEY CHANGED: {seen}, but {line.place} knows this host by the {line.kind} key {fingerprint(line.blob)}. Somebody may "
            "be listening in, or the server was installed anew. Nothing was sent to it. If whoever runs the server confirms the new "
            f"fingerprint, remove that line and log in once with the OpenSSH client, or set host_fingerprint={shown!r}"
        )
    return (
        f"HOST KEY UNKNOWN: {seen}, and no key of this host is in {', '.join(endpoint.known_hosts_files)}. Nothing was sent to it. Compare "
        "the fingerprint with what whoever runs the server says, then log in once with "
        f"`ssh -p {endpoint.port} {endpoint.user}@{endpoint.host}`, or set host_fingerprint={shown!r}"
    )
