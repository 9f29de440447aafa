"""Two hosts with one node's credentials and real guests: never two runners of one VM (I1)."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest
from tests.e2e.platform import until
from tests.hosts.box import Box
from tests.hosts.fleet import RUN, Fleet, Host, fleet

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

NODE, OTHER = "n1", "x1"
ASKS_S = 15.0
"""A second host retries every 5 s."""


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    with fleet(hosts=1, servers=1) as made:
        made.create("web")
        yield made


def word(host: Host) -> str:
    """Return the message of the host's agent to its services."""
    with suppress(OSError):
        return host.box.path(RUN / "instance").read_text().split()[0]
    return ""


@contextmanager
def second(platform: Fleet, *, copied: str) -> Iterator[Host]:
    """Add one more host with n1's credentials, powered off; `disk`: its disk is a copy of n1's."""
    first = platform.hosts[NODE]
    box = Box(first.box._boxes, OTHER, 9)
    host = Host(box, first._environ, first._argv)
    disk = box.base / "disk"
    if copied == "disk":
        disk.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(first.box.base / "disk"), str(disk)], check=True)
    try:
        yield host
    finally:
        with suppress(AssertionError):
            box.off()
        subprocess.run(["rm", "-rf", "--one-file-system", str(disk)], check=True)


class Runners:
    """Records each moment at which a VM ran on both hosts."""

    def __init__(self, *hosts: Host) -> None:
        self._hosts = hosts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="runners")
        self.twice: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            ran = [set(host.emulators().values()) for host in self._hosts]
            if both := set.intersection(*ran):
                self.twice.append(f"{time.monotonic():.1f}: {sorted(both)}")


def killed(host: Host) -> None:
    host.box.unkeep("up")
    for name, pid in host.pids().items():
        if name not in {"libvirtd", "virtlogd"}:
            host.box.kill(pid)


ENDS: dict[str, tuple[Callable[[Host], None], Callable[[Host], None]]] = {
    "runs": (lambda _: None, lambda _: None),
    "killed": (killed, Host.start),
    "cut": (lambda first: first.box.cut(), lambda first: first.box.heal()),
    "off": (Host.off, Host.on),
}


@pytest.mark.parametrize("copied", ["credentials", "disk"])
@pytest.mark.parametrize("end", ENDS)
def test_a_second_host_starts_no_guest_in_any_state_of_the_first(
    platform: Fleet, end: str, copied: str
) -> None:
    first = platform.hosts[NODE]
    (uid,) = platform.uids
    until(lambda: uid in first.emulators().values(), "the guest runs", within_s=90)
    ends, begins = ENDS[end]
    with second(platform, copied=copied) as other, Runners(first, other) as seen:
        ends(first)
        other.on()
        until(lambda: word(other) == "refused", other.log, within_s=90)
        time.sleep(ASKS_S)
        assert other.emulators() == {}
        begins(first)
        platform.wait_whole()
        until(lambda: uid in first.emulators().values(), "the guest runs again", within_s=90)
        assert other.emulators() == {}
        assert seen.twice == []


def test_a_person_gives_the_node_to_the_second_host_and_the_first_ends_its_guests(
    platform: Fleet,
) -> None:
    first = platform.hosts[NODE]
    (uid,) = platform.uids
    until(lambda: uid in first.emulators().values(), "the guest runs", within_s=90)
    with second(platform, copied="credentials") as other:
        other.on()
        until(lambda: word(other) == "refused", other.log, within_s=90)
        until(
            lambda: platform.cli("node", "get", NODE).count("second agent") == 1,
            "the second agent is told of, and none of a test before",
        )
        refused = platform.try_cli("node", "takeover", NODE, "--confirm", "it was scrapped")
        assert refused.returncode != 0
        assert "was heard" in refused.stderr
        first.box.cut()  # a false confirmation: its guests still run
        say = ("node", "takeover", NODE, "--confirm", "it was scrapped")
        until(lambda: platform.try_cli(*say).returncode == 0, "given away", within_s=90)
        until(lambda: uid in other.emulators().values(), other.log, within_s=120)
        first.box.heal()
        until(lambda: first.emulators() == {}, "the first host ends its guests", within_s=90)
        assert uid in other.emulators().values()
        assert word(first) == "refused"


def test_the_logs_contain_the_cause(platform: Fleet) -> None:
    assert "another host" in Path(platform.hosts[NODE].box.base / "up.log").read_text()
