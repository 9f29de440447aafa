"""The binding passt, with a booted guest and the platform around it."""

import json
import os
import signal
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import Platform, address, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

GATEWAY = "10.127.0.1"
NIC: dict[str, Any] = {"name": "default", "binding": "passt", "ports": [{"port": 22}]}


def passt(uid: str) -> dict[str, int]:
    """Return the processes of the VM's interface, by their first words."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if f"passt-{uid}-0" in words[:6]:
                    found[words[0]] = int(folder.name)
    return found


def is_new(uid: str, ended: int) -> bool:
    now = passt(uid)
    return len(now) == 2 and ended not in now.values()


def greeting(where: str) -> bytes:
    """Return the first bytes of an sshd; passt resets connections until it listens."""
    with suppress(OSError), socket.create_connection((where, 22), 10) as connection:
        return connection.recv(4)
    return b""


def is_refused(where: str, port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(5)
        return connection.connect_ex((where, port)) != 0


def test_a_guest_behind_passt_is_reached_at_its_ports_and_outlives_each_process(
    patient: Platform, tmp_path: Path
) -> None:
    platform, login = patient, Login(tmp_path)
    file = tmp_path / "vm.json"
    spec = {"domain": {"devices": {"interfaces": [NIC]}}, "networks": [{"name": "default"}]}
    file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "spec": spec}))
    view = platform.create("web", "-f", str(file), "--ssh-key", login.public_key, wait="ready")
    other = platform.create("other", wait="ready")
    own, uid = address(view), view["uid"]

    def in_guest(command: str) -> str:
        return login(view, command).strip()

    until(lambda: greeting(own) == b"SSH-", "its sshd answers")
    assert own in in_guest("ip -4 addr show dev eth0"), "the address comes by DHCP"
    assert f"default via {GATEWAY}" in in_guest("ip route")
    assert " 0% packet loss" in in_guest(f"ping -c 2 -W 5 {GATEWAY}")
    assert " 0% packet loss" in in_guest(f"ping -c 2 -W 5 {address(other)}")
    banner = in_guest(f"sleep 5 | nc {address(other)} 22 | head -c 4")
    assert banner == "SSH-", "TCP to another guest"
    assert address(other) in in_guest("nslookup other.default.vm.internal"), "UDP to the gateway"
    in_guest("(while true; do echo hello | nc -l -p 8080; done) >/dev/null 2>&1 </dev/null &")
    assert is_refused(own, 8080), "the port is not listed"

    explained = platform.cli("vm", "net", "web", "--check")
    assert "The process passt reads eth0" in explained
    assert "It accepts 22/tcp for the guest" in explained
    assert "Check: each part is as it should be." in explained

    started = passt(uid)
    assert len(started) == 2
    for word in started:
        ended = passt(uid)[word]
        os.kill(ended, signal.SIGKILL)
        until(partial(is_new, uid, ended), "new processes")
        until(lambda: greeting(own) == b"SSH-", "its sshd is reached again")
    said = "its passt has ended"
    until(lambda: said in platform.cli("vm", "events", "web", "-o", "json"), "the event")
    kept = passt(uid)
    for service in ("netd", "nodeagent"):
        platform.wait_back(service, platform.kill(service))
    assert passt(uid) == kept
    assert " 0% packet loss" in in_guest(f"ping -c 2 -W 5 {GATEWAY}")
    assert platform.get("web")["interfaces"][0]["addresses"][0].startswith(own)

    platform.delete("web", "other")
    assert passt(uid) == {}
    platform.nothing_left()
