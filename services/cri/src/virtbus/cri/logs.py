"""Copies the consoles of running guests to log files, one for each container."""

import asyncio
import logging
from pathlib import Path

from virtbus.bus.runtime.sources import Sources
from virtbus.cri.core.pod import Container, Pod
from virtbus.cri.edge.console_follower import ConsoleFollower
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Time after a guest's end in which the agent may still write the last output of the console."""


class ContainerLogs:
    """The logs of this node's running containers. `places` has the stored positions."""

    def __init__(self, consoles: Path, places: Path, sources: Sources) -> None:
        self._consoles = consoles
        self._places = places
        self._sources = sources
        self._followers: dict[str, ConsoleFollower] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._group: asyncio.TaskGroup | None = None
        self._early: list[Pod] = []

    def path(self, pod: Pod, container: Container) -> str:
        """Return the absolute path of a container's log; empty if the container has no log."""
        folder = pod.sandbox(container.sandbox_id).config.log_directory
        name = container.config.log_path
        return str(Path(folder, name)) if folder and name else ""

    def reopen(self, container: Container) -> None:
        """Open a container's log file again. kubelet has renamed the old file to rotate the log.

        Raises:
            VirtbusError: 409 `not_running`; 503 `log_unwritable`.
        """
        follower = self._followers.get(container.id)
        if follower is None:
            message = f"the container {container.id} does not run, so its log is closed"
            raise VirtbusError(Code.CONFLICT, "not_running", message)
        try:
            follower.reopen()
        except OSError as error:
            message = f"cannot open the log: {error}"
            raise VirtbusError(Code.UNAVAILABLE, "log_unwritable", message) from error

    def changed(self, pod: Pod) -> None:
        if self._group is None:
            self._early.append(pod)
            return
        for container in pod.containers:
            known = container.id in self._followers
            if container.up and not known and pod.machine is not None:
                self._begin(pod, container, pod.machine.uid)
            elif known and not container.up:
                self._ended[container.id].set()

    def _begin(self, pod: Pod, container: Container, uid: str) -> None:
        path = self.path(pod, container)
        if not path or self._group is None:
            return
        place = self._places / f"{container.id}.json"
        console = self._consoles / f"{uid}.log"
        follower = ConsoleFollower(console, Path(path), place, self._sources)
        try:  # the start is not requested yet: the console still has an earlier attempt's output
            follower.begin(fresh=container.phase == "starting")
        except OSError as error:
            log.error("no log for %s: %s", container.id, error, extra={"code": "log_failed"})
            return
        self._followers[container.id] = follower
        self._ended[container.id] = ended = asyncio.Event()
        self._group.create_task(self._follow(container.id, follower, ended))

    async def _follow(
        self, container_id: str, follower: ConsoleFollower, ended: asyncio.Event
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                copying = group.create_task(follower.run())
                await ended.wait()
                await asyncio.sleep(LINGER_S)
                copying.cancel()
            follower.finish()
        finally:
            follower.close()
            del self._followers[container_id], self._ended[container_id]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            early, self._early = self._early, []
            for pod in early:
                self.changed(pod)
            await asyncio.get_running_loop().create_future()
