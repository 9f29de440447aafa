"""Makes a VM's disks, as imaged's step of a create."""

from collections.abc import Mapping

from virtbus.bus.client.record_worker import Ensured
from virtbus.imaged.core.disk_requests import brings_secret, refs_of
from virtbus.imaged.device_roots import DeviceRoots
from virtbus.imaged.disks import Disks
from virtbus.imaged.fill_waits import FillWaits
from virtbus.imaged.reporter import DiskReporter
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import ImageReady
from virtbus.schemas.vm import VmRecord


class DiskStep:
    """A `virtbus.bus.client.record_worker.Step`. Existing disks are checked and kept."""

    name = "make the disks"
    span = "virtbus ensure image"
    first_retry_s = 1.0
    interrupts = True

    def __init__(
        self, disks: Disks, waits: FillWaits, reporter: DiskReporter, roots: DeviceRoots
    ) -> None:
        self._disks = disks
        self._roots = roots
        self.waits = waits
        self._reporter = reporter
        self.refs: dict[str, frozenset[str]] = {}
        """By uid: the image references in the VM's record on the bus."""

    def follows(self, record: VmRecord) -> bool:
        """Note the image references of a VM; return False if the VM has pull secrets.

        The agent of a VM with pull secrets requests the disks, and sends the secrets.
        """
        self.refs[record.uid] = refs_of(record)
        return not brings_secret(record.spec)

    def forgets(self, uid: str) -> None:
        self.refs.pop(uid, None)

    async def ensure(self, record: VmRecord, logins: Mapping[str, str]) -> Ensured[ImageReady]:
        """Wait until the VM's copied volumes have content, then ensure every disk of the record.

        Errors are those of `FillWaits.wait`, `Disks.ensure` and `DeviceRoots.ensure`.
        """
        await self.waits.wait(record)
        asker = Asker(self._reporter.listener(record), record.uid, record.namespace)
        await self._roots.ensure(record, asker)
        done = await self._disks.ensure(record, self._reporter.listener(record), logins)
        return Ensured(done.ready, {"digest": done.ready.digest} if done.made else None)

    def refusal(self, record: VmRecord, error: VirtbusError) -> ImageReady:
        uid, epoch, generation = record.uid, record.epoch, record.generation
        return ImageReady(uid=uid, epoch=epoch, generation=generation, error=error.body)
