"""A guest with a kernel of its own: a namespace whose link is connected with a VM's tap.

Its TCP is that of Linux, so it shows what frames made by hand cannot: data and ends of connections.
"""

import asyncio
import contextlib
import os
import select
import subprocess
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.netd.tests.pretended_host import Node, enter
from services.netd.tests.segment import run

from virtbus.netd.core.masquerade import guest_side
from virtbus.netd.edge.taps import open_tap

_MOST = 65_546


class Machine:
    """A namespace by its name; without one, the host's."""

    def __init__(self, netns: str) -> None:
        self.netns = netns

    async def starts(self, code: str, *words: str) -> Process:
        """Start a Python program in the namespace."""
        inside = ("ip", "netns", "exec", self.netns) if self.netns else ()
        command = (*inside, "/usr/bin/python3", "-c", code, *words)
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


@asynccontextmanager
async def machine(node: Node, uid: str, *, router6: str = "fe80::1") -> AsyncIterator[Machine]:
    """Boot a machine on the first interface of an attached VM; afterwards nothing is left."""
    attachment, taps = await node.attachments.take_taps(uid, 5.0)
    nic = guest_side(attachment.nics[0])
    netns = f"vbtest-guest-{os.getpid()}-{uid[-1]}"
    run(f"ip netns add {netns}")
    ended, end = os.pipe()
    try:
        own = _link(netns)
        run(f"ip -n {netns} link set lo up")
        run(f"ip -n {netns} link set eth0 address {nic.mac} mtu {nic.mtu} up")
        for address in nic.addresses:
            run(f"ip -n {netns} addr add {address} dev eth0 {'nodad' if ':' in address else ''}")
        if nic.gateway:
            run(f"ip -n {netns} route add default via {nic.gateway}")
        if nic.gateway6:
            run(f"ip -n {netns} -6 route add default via {router6} dev eth0")
        copier = threading.Thread(target=_copy, args=(taps[0], own, ended))
        copier.start()
        try:
            await asyncio.sleep(0.3)  # the kernel sends nothing to a tap in its first moments
            yield Machine(netns)
        finally:
            os.close(end)
            copier.join()
            os.close(own)
    finally:
        os.close(ended)
        for fd in taps:
            os.close(fd)
        subprocess.run(f"ip netns del {netns}".split(), check=False)


def _link(netns: str) -> int:
    """Make the link of a machine; return its other end."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    try:
        enter(there)
        return open_tap("eth0")
    finally:
        enter(here)
        os.close(there)
        os.close(here)


def _copy(one: int, other: int, ended: int) -> None:
    """Copy frames both ways until `ended` is readable. A link that is down loses them."""
    poll = select.poll()
    for fd in (one, other, ended):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _events in poll.poll()}
        if ended in ready:
            return
        for source, target in ((one, other), (other, one)):
            if source in ready:
                with contextlib.suppress(OSError):
                    os.write(target, os.read(source, _MOST))
