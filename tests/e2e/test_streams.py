"""Connections over the bus between people and a guest: logins, ports, displays."""

import json
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import Platform, Refused

pytestmark = pytest.mark.e2e


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_ssh_reaches_a_guest_over_the_bus(platform: Platform, login: Login, tmp_path: Path) -> None:
    view = platform.create("web", "--ssh-key", login.public_key, wait="ready")
    login(view, "true")  # its sshd may start a moment after its address answers
    platform.environ["HOME"] = str(tmp_path)
    key = login.public_key.removesuffix(".pub")
    known = tmp_path / ".ssh" / "virtbus_known_hosts"
    done = platform.try_cli("vm", "ssh", "root@web", "-i", key, "--", "echo", "over-$((6*7))")
    assert done.stdout.strip() == "over-42", done.stderr
    assert "ssh-" in known.read_text()
    sent = os.urandom(300_000).hex()
    got = platform.cli("vm", "ssh", "root@web", "-i", key, "--", "cat", input_text=sent)
    assert got == sent
    refused = platform.try_cli("vm", "port-forward", "web", "9", "--stdio")
    assert refused.returncode == 1
    assert "nothing listens on port 9 of the guest" in refused.stderr


def test_a_display_is_seen_over_the_bus(platform: Platform, tmp_path: Path) -> None:
    platform.create("seen", "--display")
    platform.create("blind")
    picture = tmp_path / "seen.png"
    platform.cli("vm", "screenshot", "seen", "-f", str(picture))
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    viewer = platform.start_cli("vm", "vnc", "seen", "-o", "json")
    try:
        assert viewer.stdout is not None
        told = document(viewer.stdout)
        for _ in range(2):  # one viewer after the other
            assert _rfb_size(told["address"], told["port"]) == (width, height)
    finally:
        viewer.terminate()
        viewer.communicate(timeout=10)
    with pytest.raises(Refused) as refused:
        platform.cli("vm", "screenshot", "blind", "-o", "json")
    assert refused.value.error["reason"] == "no_display"


def document(out: IO[str]) -> Any:
    text = ""
    for line in out:
        text += line
        with suppress(ValueError):
            return json.loads(text)
    raise AssertionError(text)


def _rfb_size(address: str, port: int) -> tuple[int, int]:
    """Return the display's size, by RFB's handshake (RFC 6143 §7.1-7.3), and one whole update."""
    with socket.create_connection((address, port), timeout=30) as viewer:
        into = viewer.makefile("rb")
        assert into.read(12) == b"RFB 003.008\n"
        viewer.sendall(b"RFB 003.008\n")
        assert into.read(1) == b"\x01"
        assert into.read(1) == b"\x01"  # security type None
        viewer.sendall(b"\x01")
        assert into.read(4) == bytes(4)
        viewer.sendall(b"\x01")  # shared
        width, height = struct.unpack(">HH", into.read(4))
        depth = into.read(16)[0] // 8
        into.read(struct.unpack(">I", into.read(4))[0])
        viewer.sendall(struct.pack(">BBHHHH", 3, 0, 0, 0, width, height))
        _, _, rectangles = struct.unpack(">BBH", into.read(4))
        pixels = 0
        for _ in range(rectangles):
            _, _, w, h, encoding = struct.unpack(">HHHHi", into.read(12))
            assert encoding == 0
            assert len(into.read(w * h * depth)) == w * h * depth
            pixels += w * h
        assert pixels == width * height
        return width, height
