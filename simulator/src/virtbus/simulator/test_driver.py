"""Connects to libvirt's test driver. Its hosts exist only in this process, and never block."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.libvirt_calls import Threads

Result = TypeVar("Result")
EMPTY = "<node><cpu><mhz>2000</mhz><model>x86_64</model></cpu></node>\n"
STARTS_AT_ONCE = 8


def empty_host(path: Path) -> str:
    """Write the description of an empty host to `path`; return the host's libvirt URI."""
    path.write_text(EMPTY)
    return f"test://{path.absolute()}"


def hypervisor(path: Path) -> LibvirtHypervisor:
    """Return the hypervisor of an empty host. Write the host's description to `path`."""
    return LibvirtHypervisor(
        empty_host(path), starts_at_once=STARTS_AT_ONCE, calls=InlineCalls("libvirt")
    )


class InlineCalls(Threads):
    """Runs libvirt's calls on the loop itself, without a thread."""

    async def call(
        self,
        work: Callable[[], Result],
        *,
        timeout_s: float,
        settled: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> Result:
        """Run `work`, then `settled` and `ended`; return the result of `work`."""
        del timeout_s
        try:
            return work()
        finally:
            for after in (settled, ended):
                if after is not None:
                    after()
