"""The full guest `debian`, from first boot to power-off, as an example of users' images."""

import asyncio
import json
import os
import select
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.login import MIRROR, MIRROR_PORT, Login
from tests.e2e.platform import NODE, Json, Platform, Refused, address, until
from tests.e2e.test_streams import document

from virtbus.schemas import subjects
from virtbus.schemas.guest import GuestExecuted
from virtbus.schemas.wire import validate

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

BOOT_S = 1200.0
"""A minute on an idle machine without KVM; a crowded one takes far longer."""
SEED = """#cloud-config
users:
  - default
  - name: admin
    plain_text_passwd: correct-horse
    lock_passwd: false
    shell: /bin/bash
write_files:
  - {path: /etc/motd.virtbus, permissions: '0640', content: of the seed}
runcmd:
  - [sh, -c, 'echo ran > /root/ran-by-runcmd']
"""


def debian_image() -> Path:
    """The image of `make debian-image`."""
    path = os.environ.get("VIRTBUS_DEBIAN", "/var/lib/virtbus/images/src/debian.qcow2")
    assert Path(path).exists(), f"{path} is not there; build it by `make debian-image`"
    return Path(path)


class Terminal:
    """A piped `virtbus vm console`, with its input and output."""

    def __init__(self, platform: Platform, name: str) -> None:
        self._process = platform.start_cli("vm", "console", name)
        self._seen = b""

    def type(self, line: str) -> None:
        """Send a line, with its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def wait_for(self, word: str, within_s: float = 120) -> None:
        """Return once `word` has appeared since the last wait."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        source = self._process.stdout.fileno()
        while (found := self._seen.find(word.encode())) < 0:
            ready = select.select([source], [], [], max(0, deadline - time.monotonic()))[0]
            data = os.read(source, 4096) if ready else b""
            assert data, f"{word!r} not in {self._seen!r}"
            self._seen += data
        self._seen = self._seen[found + len(word) :]

    def end(self) -> None:
        """Leave the console."""
        self._process.terminate()
        self._process.communicate(timeout=10)


@contextmanager
def console(platform: Platform, name: str) -> Iterator[Terminal]:
    terminal = Terminal(platform, name)
    try:
        yield terminal
    finally:
        terminal.end()


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path, user="debian")


@pytest.fixture
def guest(platform: Platform, login: Login, tmp_path: Path) -> Json:
    """A VM of the image, whose guest has reported that it is ready."""
    shutil.copy(debian_image(), platform.state_dir / "images/src/debian.qcow2")
    seed = tmp_path / "seed.yaml"
    seed.write_text(SEED)
    platform.create(
        *("full", "--image", "debian", "--memory", "512MiB", "--disk", "3GiB"),
        *("--ssh-key", login.public_key, "--user-data", str(seed)),
    )
    until(
        lambda: "GUEST-NICS " in platform.console_log("full"),
        lambda: platform.console_log("full")[-4000:],
        within_s=BOOT_S,
    )
    return platform.get("full")


def test_a_full_guest_applies_its_seed_and_accepts_a_login(
    platform: Platform, login: Login, guest: Json
) -> None:
    log = platform.console_log("full")
    nic = guest["interfaces"][0]
    assert f"GUEST-READY hostname=full ip={address(guest)}" in log
    assert f"={nic['mac']}/{address(guest)}" in log

    assert login(guest, "cloud-init status --wait").split() == ["status:", "done"]
    assert login(guest, "cat /run/cloud-init/cloud-id").strip() == "nocloud"
    assert login(guest, "hostname; sudo id -u; sudo cat /root/ran-by-runcmd").split() == [
        "full",
        "0",
        "ran",
    ]
    assert login(guest, "sudo cat /etc/motd.virtbus; stat -c :%a /etc/motd.virtbus") == (
        "of the seed:640\n"
    )
    assert int(login(guest, "df -m --output=size / | tail -n 1")) > 2500, "the root takes the room"
    assert int(login(guest, "grep -c ^deb /etc/apt/sources.list")) > 0
    assert login(guest, "sudo grep WARNING /var/log/cloud-init.log || :") == ""
    assert login(guest, "systemctl is-active qemu-guest-agent").strip() == "active"
    runs_a_program(platform, guest)
    assert login(guest, "systemctl --failed --no-legend") == ""

    with console(platform, "full") as terminal:
        terminal.type("")
        terminal.wait_for("login: ")
        terminal.type("admin")
        terminal.wait_for("Password: ")
        terminal.type("correct-horse")
        terminal.wait_for("admin@full")
        terminal.type("echo typed-$((6*7))")
        terminal.wait_for("typed-42")

    login(guest, MIRROR)
    its_datagrams_come_and_go(platform)
    the_guest_tells_of_itself(platform, guest)
    a_hung_agent_costs_only_its_asker(platform, login, guest)
    a_frozen_guest_waits_until_its_deadline(platform, login, guest)

    platform.cli("vm", "stop", "full", "--grace", "600", "--timeout", "600", timeout_s=700)
    assert "Power down" in platform.console_log("full"), "it was not the guest that ended"


def its_datagrams_come_and_go(platform: Platform) -> None:
    process = platform.start_cli("vm", "port-forward", "full", f"0:{MIRROR_PORT}/udp", "-o", "json")
    try:
        assert process.stdout is not None
        host, _, port = document(process.stdout)["local"].rpartition(":")
        with socket.socket(type=socket.SOCK_DGRAM) as ours:
            ours.settimeout(60)
            ours.connect((host, int(port)))
            for said in (b"ping", b"x" * 1400):
                ours.send(said)
                assert ours.recv(9000) == said[::-1]
    finally:
        process.terminate()
        process.communicate(timeout=10)


def the_guest_tells_of_itself(platform: Platform, guest: Json) -> None:
    told = json.loads(platform.cli("vm", "guest", "full", "--timeout", "60", "-o", "json"))
    assert (told["hostname"], told["os"]["id"]) == ("full", "debian")
    assert "admin" in {user["name"] for user in told["users"]}, "who is on the console"
    (root,) = (fs for fs in told["filesystems"] if fs["mountpoint"] == "/")
    assert root["total_bytes"] > 2.5 * 1024**3
    assert root["disks"] == ["vda"]
    mac = guest["interfaces"][0]["mac"]
    (nic,) = (nic for nic in told["interfaces"] if nic["mac"] == mac)
    assert address(guest) in {each.partition("/")[0] for each in nic["addresses"]}
    assert "Debian GNU/Linux" in platform.cli("vm", "guest", "full", "os", "--timeout", "60")


def runs_a_program(platform: Platform, guest: Json) -> None:
    """Run a program by the guest agent, as the container runtime does."""
    words = ("sh", "-c", "id -un; echo no >&2; exit 7")
    want = {"uid": guest["uid"], "words": words, "timeout_s": 30}

    async def ask() -> GuestExecuted:
        async with platform.bus() as bus:
            answer = await bus.request(subjects.rpc(NODE, "agent", "exec"), want, timeout_s=40)
        return validate(GuestExecuted, answer)

    done = asyncio.run(ask())
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"root\n", b"no\n")


def a_hung_agent_costs_only_its_asker(platform: Platform, login: Login, guest: Json) -> None:
    ping = ("vm", "guest", "full", "ping", "--timeout")
    login(guest, "sudo systemctl kill --signal=STOP qemu-guest-agent")
    with pytest.raises(Refused) as refused:
        platform.cli(*ping, "2", "-o", "json")
    assert refused.value.error["reason"] == "guest_agent_silent"
    assert platform.get("full")["state"] == "Running"
    platform.create("beside")
    platform.delete("beside")
    login(guest, "sudo systemctl kill --signal=CONT qemu-guest-agent")
    assert until(lambda: platform.try_cli(*ping, "60").stdout, "it answers again") == (
        "full answers\n"
    )


def a_frozen_guest_waits_until_its_deadline(platform: Platform, login: Login, guest: Json) -> None:
    """The agent is killed while the guest is frozen; the next one thaws it."""
    write = "sudo sh -c 'echo frozen > /root/frozen.txt; sync'"
    platform.cli("vm", "freeze", "full", "--timeout", "4s")
    begun_s = time.monotonic()
    assert "Frozen" in {one["type"] for one in platform.get("full")["conditions"]}
    platform.cli("vm", "freeze", "full", "--timeout", "8s")
    platform.wait_back("nodeagent", platform.kill("nodeagent"))
    login(guest, write)
    assert time.monotonic() - begun_s > 7, "the write waited for the thaw"
    until(
        lambda: "Frozen" not in {one["type"] for one in platform.get("full")["conditions"]},
        "it is thawed",
    )
    platform.cli("vm", "freeze", "full")
    platform.cli("vm", "thaw", "full")
    assert {"guest.frozen", "guest.thawed"} <= set(platform.events("full"))
