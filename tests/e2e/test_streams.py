"""What travels over the bus between people and a guest: logins, ports."""

import os
from pathlib import Path

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import Platform

pytestmark = pytest.mark.e2e


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_ssh_reaches_a_guest_over_the_bus(platform: Platform, login: Login, tmp_path: Path) -> None:
    view = platform.create("web", "--ssh-key", login.public_key, wait="ready")
    login(view, "true")  # its sshd may be a moment behind its address
    platform.environ["HOME"] = str(tmp_path)
    key = login.public_key.removesuffix(".pub")
    done = platform.try_cli("vm", "ssh", "root@web", "-i", key, "--", "echo", "over-$((6*7))")
    assert done.stdout.strip() == "over-42", done.stderr
    sent = os.urandom(300_000).hex()
    got = platform.cli("vm", "ssh", "root@web", "-i", key, "--", "cat", input_text=sent)
    assert got == sent
    refused = platform.try_cli("vm", "port-forward", "web", "9", "--stdio")
    assert refused.returncode == 1
    assert "nothing listens on port 9 of the guest" in refused.stderr
