"""The bus is away for ten minutes, and netd restarts meanwhile: guests notice nothing."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import Platform, address, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

OUTAGE_S = 600.0
EVERY_S = 15.0


def test_guests_keep_addresses_names_and_leases_while_the_bus_is_away(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    patient.create("one", "--ssh-key", login.public_key, wait="")
    patient.create("two", "--ssh-key", login.public_key, wait="")
    one, two = patient.wait_ready("one", "two")
    lease = login(one, "ip -4 addr show eth0; ip route; cat /etc/resolv.conf")

    def works() -> None:
        assert address(two) in login(one, "nslookup two.default.vm.internal")
        assert "1 packets received" in login(one, "ping -c 1 -W 5 two")
        assert login(one, "ip -4 addr show eth0; ip route; cat /etc/resolv.conf") == lease

    def lasts(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            works()
            time.sleep(EVERY_S)

    works()
    server = patient.kill("nats-server", signal.SIGSTOP)
    try:
        login(one, "kill -USR1 $(pidof udhcpc)")  # netd renews the lease without the bus
        lasts(OUTAGE_S / 2)
        dead = patient.kill("netd")
        until(lambda: patient.pids().get("netd") not in {None, dead}, "netd is started again")
        lasts(OUTAGE_S / 2)
    finally:
        os.kill(server, signal.SIGCONT)
    patient.wait_whole()
    works()
    login(one, "kill -USR1 $(pidof udhcpc)")
    works()
    again_one, again_two = patient.wait_ready("one", "two")
    for before, after in ((one, again_one), (two, again_two)):
        assert (after["uid"], after["interfaces"]) == (before["uid"], before["interfaces"])
        assert after["started_ns"] == before["started_ns"]
