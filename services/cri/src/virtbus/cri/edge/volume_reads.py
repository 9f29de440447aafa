"""Reads the volumes of pods in threads, so that a hung mount of one pod delays no other pod."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from virtbus.cri.core.configs import ContainerConfig
from virtbus.cri.core.pod_dns import Hosts, hosts_files
from virtbus.cri.core.pod_volumes import as_files
from virtbus.cri.edge import volume_files
from virtbus.cri.edge.volume_files import Offered
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest_files import GuestFile

T = TypeVar("T")

LIMIT_S = 20.0
"""Time limit of a read of a pod's volumes. kubelet's limit of a call is 120 s."""
MOST = 64
"""Maximum number of concurrent reads. A hung read keeps its thread until the server answers."""


class VolumeReads:
    """Runs at most one read at a time for each pod.

    The threads are daemons, so the process can end while a thread hangs in the kernel.
    """

    def __init__(self, offered: Callable[[], Offered] = Offered, limit_s: float = LIMIT_S) -> None:
        """`offered` returns the node's offer to flexvolumes."""
        self._offered = offered
        self._limit_s = limit_s
        self._reading: set[str] = set()

    async def inspected(self, pod: str, namespace: str, config: ContainerConfig) -> ContainerConfig:
        """Return the result of `volume_files.inspected`, with the node's current offer.

        Raises:
            VirtbusError: 400: the pools' file is invalid. 503 `volume_stuck`: the read takes too
                long, or an earlier read has not returned.
        """
        offered = self._offered()
        return await self._run(pod, lambda: volume_files.inspected(config, namespace, offered))

    async def files(self, pod: str, config: ContainerConfig) -> tuple[GuestFile, ...]:
        """Return the files for a pod's guest.

        Raises:
            VirtbusError: 503 `volume_stuck`. The errors of `volume_files.read_files`.
        """
        mounts = as_files(config.mounts)
        return await self._run(pod, lambda: volume_files.read_files(mounts)) if mounts else ()

    async def hosts(self, pod: str, config: ContainerConfig) -> Hosts:
        """Return the contents of the file that kubelet mounts at /etc/hosts.

        Raises:
            VirtbusError: 503 `volume_stuck`. The errors of `volume_files.read_hosts`.
        """
        mounts = hosts_files(config.mounts)
        return await self._run(pod, lambda: volume_files.read_hosts(mounts)) if mounts else Hosts()

    async def _run(self, pod: str, read: Callable[[], T]) -> T:
        if pod in self._reading or len(self._reading) >= MOST:
            raise _stuck("an earlier read of volumes has not returned")
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # a cancelled call must not cancel `done`

        def work() -> None:
            try:
                result = read()
            except Exception as error:  # noqa: BLE001  raised again where it is awaited
                self._reading.discard(pod)
                done.set_exception(error)
            else:
                self._reading.discard(pod)
                done.set_result(result)

        self._reading.add(pod)
        threading.Thread(target=work, name="volumes", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), self._limit_s)
        except TimeoutError:
            why = f"reading the pod's volumes takes more than {self._limit_s:.0f} s"
            raise _stuck(why) from None


def _stuck(why: str) -> VirtbusError:
    message = f"{why}; check the servers of its mounts (NFS, CSI) on this node"
    return VirtbusError(Code.UNAVAILABLE, "volume_stuck", message)
