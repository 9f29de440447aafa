"""The life of one guest: each test uses, stops or starts the guest that the tests before it left.

A boot costs more than all that most tests do with a guest. So these tests share one, in one lane.
"""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, Refused, address, is_ready, until
from tests.e2e.stage import STAGE, drop_if_failed, end_whole

pytestmark = pytest.mark.e2e

NAME, BOOT = "web", "GUEST-READY"
SEED = """#cloud-config
write_files:
  - path: /etc/motd.virtbus
    permissions: '0640'
    content: |
      a line with "quotes" & $dollars
runcmd:
  - [sh, -c, 'echo ran > /root/ran-by-runcmd']
"""


class Guest:
    """The guest of this module, on the shared platform; made again after a test that failed."""

    def __init__(self, folder: Path) -> None:
        self._login = Login(folder)
        self._seed = folder / "seed.yaml"
        self._seed.write_text(SEED)
        self.platform: Platform = STAGE.get()
        self.created: Json = {}
        """The view that the create returned."""

    def ensure(self) -> None:
        """Make the platform and the guest, unless both exist."""
        self.platform = STAGE.get()
        if not self.platform.vms():
            seed = ("--ssh-key", self._login.public_key, "--user-data", str(self._seed))
            self.created = self.platform.create(NAME, *seed, wait="ready")
            until(lambda: BOOT in self.console(), "its shell")  # it answers a ping before

    @property
    def view(self) -> Json:
        return self.platform.get(NAME)

    @property
    def uid(self) -> str:
        return str(self.created["uid"])

    def cli(self, verb: str, *argv: str) -> str:
        return self.platform.cli("vm", verb, NAME, *argv)

    def login(self, command: str) -> str:
        return self._login(self.view, command)

    def console(self) -> str:
        return self.platform.console_log(NAME)

    def pid(self) -> int:
        """Return the process of its emulator."""
        (pid,) = host.qemu_pids(self.uid)
        return pid

    def wait_ready(self) -> Json:
        (view,) = self.platform.wait_ready(NAME)
        return view


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    shared = Guest(tmp_path_factory.mktemp("guest"))
    yield shared
    end_whole(STAGE.get(), "one_guest")


@pytest.fixture
def patient_guest(request: pytest.FixtureRequest, _shared: Guest) -> Iterator[Guest]:
    """The guest in any state, on a platform whose services a test may end."""
    _shared.ensure()
    yield _shared
    drop_if_failed(_shared.platform, request.node)


@pytest.fixture
def guest(patient_guest: Guest) -> Iterator[Guest]:
    """The running guest; each service survives the test."""
    patient_guest.wait_ready()
    pids = patient_guest.platform.pids()
    yield patient_guest
    assert patient_guest.platform.pids() == pids, "a service ended in a test that did not end it"


def test_create_and_wait_ready_gives_a_guest_that_answers(guest: Guest) -> None:
    view = guest.created
    assert view["state"] == "Running"
    assert is_ready(view)
    assert view["image_digest"].startswith("sha256:")
    assert host.ping(address(view))
    until(lambda: f"{BOOT} hostname={NAME} ip={address(view)}" in guest.console(), guest.console)
    assert guest.pid()


def test_seed_gives_hostname_key_files_and_commands(guest: Guest) -> None:
    assert guest.login("hostname").strip() == NAME
    assert guest.login("cat /etc/motd.virtbus") == 'a line with "quotes" & $dollars\n'
    assert guest.login("stat -c %a /etc/motd.virtbus").strip() == "640"
    until(lambda: guest.login("cat /root/ran-by-runcmd 2>&1 || :") == "ran\n", "runcmd ran")
    assert "motd.virtbus" not in guest.cli("get", "-o", "json"), "user data is a secret"


@pytest.fixture
def internet() -> Iterator[str]:
    """The address of a machine beyond our default route; it has no route to guests."""
    name, ours, theirs = "e2e-internet", "198.51.100.1", "198.51.100.2"
    ip: Callable[..., str] = lambda *argv: host.run("ip", *argv)  # noqa: E731
    ip("netns", "add", name)
    try:
        ip("link", "add", "e2e-up", "type", "veth", "peer", "name", "e2e-far", "netns", name)
        ip("address", "add", f"{ours}/24", "dev", "e2e-up")
        ip("link", "set", "e2e-up", "up")
        ip("-n", name, "address", "add", f"{theirs}/24", "dev", "e2e-far")
        ip("-n", name, "link", "set", "e2e-far", "up")
        ip("route", "add", "default", "via", theirs)
        yield theirs
    finally:
        ip("netns", "delete", name)
        with suppress(AssertionError):
            ip("link", "delete", "e2e-up")


def test_guest_reaches_the_outside_through_masquerade(guest: Guest, internet: str) -> None:
    # no route leads back to 10.127/16 from there, so an answer proves the translation
    assert "1 packets received" in guest.login(f"ping -c 1 -W 5 {internet}")


def test_the_console_accepts_typed_input(guest: Guest) -> None:
    typed = "\necho typed-$((6*7))\n"
    done = guest.platform.try_cli("vm", "console", NAME, "--linger", "5", input_text=typed)
    assert "typed-42" in done.stdout, done.stderr


def test_console_on_a_terminal_leaves_with_its_escape_and_the_guest_runs_on(guest: Guest) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["virtbus", "vm", "console", NAME],
        env=guest.platform.environ,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    try:
        _read_until(leader, f"console of {NAME}".encode())
        os.write(leader, b"\necho at-$((40+2))\n")
        _read_until(leader, b"at-42")
        os.write(leader, b"\x1d")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert host.ping(address(guest.view))


def _read_until(descriptor: int, word: bytes, within_s: float = 20) -> None:
    seen = b""
    deadline = time.monotonic() + within_s
    while word not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"{word!r} not in {seen!r}"
        data = os.read(descriptor, 4096)
        assert data, f"ended before {word!r}: {seen!r}"
        seen += data


def test_logs_follow_the_guests_output(guest: Guest) -> None:
    following = guest.platform.start_cli("vm", "logs", NAME, "-f")
    try:
        assert following.stdout is not None
        output = following.stdout.fileno()
        _read_until(output, b"GUEST-NICS", within_s=60)
        guest.login("echo followed-$((6*7)) >/dev/console")
        _read_until(output, b"followed-42", within_s=60)
    finally:
        following.terminate()
        following.communicate(timeout=10)


def test_a_guest_without_an_agent_is_reported_with_the_next_step(guest: Guest) -> None:
    with pytest.raises(Refused) as refused:
        guest.cli("guest", "-o", "json")
    assert refused.value.error["reason"] == "guest_agent_absent"
    assert "install and start qemu-guest-agent" in refused.value.error["message"]


def test_a_paused_guest_answers_again_after_an_agent_that_died(patient_guest: Guest) -> None:
    guest, patient = patient_guest, patient_guest.platform
    at = address(guest.wait_ready())
    guest.cli("pause")
    paused = guest.view
    assert paused["state"] == "Paused"
    assert "Ready" not in {c["type"] for c in paused["conditions"] if c["status"]}
    assert not host.ping(at, wait_s=1)
    patient.wait_back("nodeagent", patient.kill("nodeagent", signal.SIGKILL))
    patient.wait_whole()
    assert guest.view["state"] == "Paused"
    pid = guest.pid()
    guest.cli("unpause")
    assert host.ping(at)
    assert guest.pid() == pid
    assert {"domain.paused", "domain.resumed"} <= set(patient.events(NAME))


def _wait_boots(guest: Guest, times: int) -> None:
    """Wait until the console log contains this many boots."""
    until(
        lambda: guest.console().count(BOOT) >= times,
        lambda: guest.console()[-2000:],
        within_s=120,
    )


def test_a_reset_and_a_soft_reboot_reboot_the_same_machine(guest: Guest) -> None:
    before = guest.view
    _wait_boots(guest, 1)
    boots, pid = guest.console().count(BOOT), guest.pid()
    for times, verb in enumerate(("reset", "soft-reboot"), boots + 1):
        guest.cli(verb)
        _wait_boots(guest, times)
        until(lambda: host.ping(address(before), wait_s=1), "it is back", within_s=60)
    assert guest.pid() == pid
    after = guest.view
    assert (after["state"], after["restarts"]) == ("Running", before["restarts"])
    assert after["reboots"] >= before["reboots"] + 2
    events = set(guest.platform.events(NAME))
    assert {"guest.reset", "guest.rebooting", "guest.rebooted"} <= events


def test_a_restart_starts_one_new_guest_with_its_changed_spec(guest: Guest) -> None:
    before, pid = guest.view, guest.pid()
    spec = before["spec"]
    spec["domain"]["memory"]["guest"] = 160 * 1024**2
    wanted = {"uid": guest.uid, "revision": before["revision"], "spec": spec}
    guest.platform.ask("vm.update", wanted)
    guest.cli("restart")
    after = guest.wait_ready()
    assert guest.pid() != pid
    assert after["restarts"] == before["restarts"]
    assert address(after) == address(before)
    until(
        lambda: "RestartRequired" not in {c["type"] for c in guest.view["conditions"]},
        "the new spec is in force",
    )


def test_stop_and_start_keep_disk_and_address(guest: Guest) -> None:
    before = guest.view
    guest.login("echo still here >/root/note; sync")
    guest.cli("stop")
    assert guest.view["state"] == "Stopped"
    assert not host.qemu_pids(guest.uid)
    assert not host.ping(address(before), wait_s=1)
    guest.cli("start")
    after = guest.wait_ready()
    assert address(after) == address(before)
    assert after["interfaces"][0]["mac"] == before["interfaces"][0]["mac"]
    assert guest.login("cat /root/note") == "still here\n"
    assert "domain.stopping" in guest.platform.events(NAME)


def test_guest_that_ignores_acpi_is_ended_after_its_grace(guest: Guest) -> None:
    guest.login("killall acpid")
    guest.cli("stop", "--grace", "2")
    assert guest.view["state"] == "Stopped"
    assert not host.qemu_pids(guest.uid)


def test_a_paused_start_runs_no_instruction_before_it_is_resumed(patient_guest: Guest) -> None:
    guest, pids = patient_guest, patient_guest.platform.pids()
    guest.cli("stop", "--grace", "0")  # the test before this one did, unless it was deselected
    guest.cli("start", "--paused")
    assert guest.view["state"] == "Paused"
    assert guest.pid()
    assert guest.console() == ""
    guest.cli("unpause")
    guest.wait_ready()  # the guest answers a ping before it prints
    until(guest.console, "output of the guest that runs")
    assert guest.platform.pids() == pids


def test_guest_that_powers_off_is_started_again_under_always(guest: Guest) -> None:
    view, pid = guest.view, guest.pid()
    assert view["spec"]["run_strategy"] == "Always"
    guest.login("poweroff")
    until(lambda: pid not in host.qemu_pids(guest.uid), "the guest halts")
    until(lambda: guest.view["restarts"] == view["restarts"] + 1, "counted")
    again = guest.platform.wait_state(NAME, "Running")
    assert guest.pid()
    assert address(again) == address(view)


def test_delete_restores_the_census_and_the_guest_answers_until_its_halt(guest: Guest) -> None:
    at = address(guest.view)
    assert host.ping(at)
    pinging = subprocess.Popen(
        ["ping", "-n", "-i", "0.2", "-O", at], stdout=subprocess.PIPE, text=True
    )
    try:
        guest.platform.delete(NAME, grace_s=None)
    finally:
        pinging.terminate()
        output, _ = pinging.communicate(timeout=10)
    answered = [line for line in output.splitlines() if "bytes from" in line]
    # a shutdown by ACPI takes more than two seconds, and the guest answers nearly all the time
    assert len(answered) >= 4, output
    assert not host.ping(at, wait_s=1)
    guest.platform.wait_quiet(within_s=10)
