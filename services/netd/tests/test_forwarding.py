"""The host's forwarding while interfaces come and go."""

import ctypes
import subprocess
import threading

import pytest
from services.netd.tests.pretended_host import Host

from virtbus.netd.edge import forwarding

pytestmark = pytest.mark.integration
CLONE_NEWNET = 0x40000000


def test_interfaces_that_vanish_while_they_are_listed_do_not_matter(host: Host) -> None:
    before = forwarding.current()
    namespace = f"/proc/self/task/{threading.get_native_id()}/ns/net"
    ended = threading.Event()

    def comes_and_goes() -> None:
        with open(namespace, "rb") as own:
            assert ctypes.CDLL(None).setns(own.fileno(), CLONE_NEWNET) == 0
        commands = "link add name {0} type bridge\nlink delete {0}\n"
        batch = "".join(commands.format(f"gone{n}") for n in range(50))
        while not ended.is_set():
            subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)

    thread = threading.Thread(target=comes_and_goes)
    thread.start()
    try:
        for _time in range(300):
            forwarding.begin(six=True)
            forwarding.restore(before)
            assert set(forwarding.current()["accept_ra"]) >= set(before["accept_ra"])
    finally:
        ended.set()
        thread.join()
