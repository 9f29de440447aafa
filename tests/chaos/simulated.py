"""A platform without QEMU (`up --simulate`), for faults that do not need a real guest."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.e2e import host
from tests.e2e.platform import Platform, until

from virtbus.bus.errors import BusError
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState

MIB = 1024**2


class Simulated(Platform):
    """The controller, the bus and an agent on libvirt's test driver."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(environ)
        self.words = ("up", "--simulate", "--port", "-1", "--data", str(self.base))

    def wait_whole(self, within_s: float = 60) -> None:
        """Return once the API answers and the agent is ready; nothing else runs here."""

        def whole() -> bool:
            try:
                nodes = NodePage.model_validate(self.ask("node.list", timeout_s=2)).items
            except (BusError, VirtbusError):
                return False
            return [node.state for node in nodes] == [NodeState.READY] and nodes[0].age_s < 10

        until(whole, "the agent ready", within_s=within_s)

    def own_disk(self, folder: Path, size_bytes: int) -> None:
        """Mount a small file system on a folder of this platform; it is unmounted at its end."""
        folder.mkdir(parents=True, exist_ok=True)
        host.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "chaos", str(folder))
        self.at_end.callback(host.run, "umount", "-l", str(folder))


@contextmanager
def simulated(platform: Platform | None = None) -> Iterator[Simulated]:
    """A simulated platform, started, and removed at the end."""
    held = platform if isinstance(platform, Simulated) else Simulated()
    try:
        held.start()
        held.wait_whole()
        yield held
        held.stop()
    finally:
        held.wipe()


class Ballast:
    """A file that fills the free space of a disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def fill(self) -> None:
        """Allocate every byte that is free now."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            for size in (MIB, 4096, 1):
                self._until_full(descriptor, size)
        finally:
            os.close(descriptor)

    @staticmethod
    def _until_full(descriptor: int, size_bytes: int) -> None:
        try:
            while True:
                os.write(descriptor, bytes(size_bytes))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def free(self) -> None:
        """Free all of it again."""
        self._path.unlink(missing_ok=True)
