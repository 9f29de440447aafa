"""netd is dead: running guests keep addresses, names, connections and ports for `lease_s`.

The guests have the shortest lease that netd's setting allows. netd dies at the worst moment, just
before they renew it. Then netd starts while the bus is away, and gives leases all the same.
"""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.platform import until
from tests.hosts.box import GATEWAY
from tests.hosts.one_host import NODE, OneHost, one_host
from tests.hosts.test_overlay import Guest, by_port, made_key

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

LEASE_S = 120.0
"""The least `lease_s`."""
RENEWED_S = LEASE_S + 30.0
"""Half of a lease, which is a minute longer than twice `lease_s`."""
EVERY_S = 5.0
TRIES = 3
"""A look that fails once may be a slow machine."""

RENEW = (
    "rm /run/net/eth0/dns; kill -USR1 $(pidof udhcpc); "
    "until [ -f /run/net/eth0/dns ]; do sleep 0.1; done; echo renewed"
)
"""A command in the guest. Its DHCP client writes the file when its renewal is acknowledged."""


@pytest.fixture(scope="module")
def platform() -> Iterator[OneHost]:
    with one_host(Path(sys.executable), {"VIRTBUS_LEASE_S": f"{LEASE_S:g}"}) as made:
        yield made


class Watched:
    """Two guests of the host, seen from outside by a published port of the first."""

    def __init__(self, platform: OneHost, folder: Path) -> None:
        self._platform = platform
        self._key = made_key(folder)
        self.one = Guest(platform, "one", NODE, self._key, "default", "--publish", "2222:22")
        self.two = Guest(platform, "two", NODE, self._key, "default")
        for guest in (self.one, self.two):
            guest.wait()
        self._addresses = (self.one.address, self.two.address)

    def outside(self, command: str) -> str:
        """Return the output of a command in the first guest, by its published port."""
        return by_port(self._key, self._platform.host.box, command)

    def works(self) -> bool:
        """Return True if the first guest has its address, port, names and ways out."""
        one, two = self._addresses
        ping = "ping -c 1 -W 5"
        told = self.outside(
            f"ip -4 addr show dev eth0 && nslookup two.default.vm.internal && {ping} two "
            f"&& {ping} {GATEWAY} && echo complete"
        )
        return f" {one}/" in told and two in told and "complete" in told

    def lasts(self) -> bool:
        """Return True if it works at one of a few tries."""
        return any(self.works() for _try in range(TRIES))

    def renews(self) -> None:
        """Let the first guest renew its lease, and fail if nobody acknowledges that."""
        assert self.outside(RENEW) == "renewed\n"


@pytest.fixture(scope="module")
def guests(platform: OneHost, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(platform, tmp_path_factory.mktemp("guests"))


def test_guests_keep_all_for_the_lease_time_while_netd_is_dead(
    platform: OneHost, guests: Watched
) -> None:
    assert guests.works()
    guests.renews()
    leased_s = time.monotonic()
    time.sleep(0.9 * RENEWED_S)
    platform.host.box.unkeep("netd")
    platform.host.box.kill(platform.host.pids()["netd"])
    killed_s = kept_until_s = time.monotonic()
    while time.monotonic() < leased_s + 3 * RENEWED_S and guests.lasts():
        kept_until_s = time.monotonic()
        time.sleep(EVERY_S)
    kept_s, before_s = kept_until_s - killed_s, killed_s - leased_s
    sys.stderr.write(
        f"\nnetd died {before_s:.0f} s after a lease; guests kept all for {kept_s:.0f} s more; "
        f"lease_s is {LEASE_S:g}\n"
    )
    assert kept_s + EVERY_S >= LEASE_S
    platform.run_service("netd")
    platform.wait_whole()
    until(guests.works, "the same address after a new lease", within_s=120)


def test_a_netd_that_starts_while_the_bus_is_away_gives_leases(
    platform: OneHost, guests: Watched
) -> None:
    box = platform.host.box
    server = platform.host.pids()["nats-server"]
    box.kill(server, signal.SIGSTOP)
    try:
        served = "networks are served; the bus is awaited"
        count = platform.service_log("netd").count(served)
        platform.host.kill("netd")
        until(lambda: platform.service_log("netd").count(served) > count, "netd serves without bus")
        guests.renews()
        assert guests.lasts()
    finally:
        box.kill(server, signal.SIGCONT)
    platform.wait_whole()
    assert guests.lasts()
    platform.nothing_left()
