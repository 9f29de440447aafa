"""Implements ports of the agent without a host: files in memory, no seeds and no disks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from virtbus.nodeagent.core.disk_sources import DiskSource, disk_sources
from virtbus.nodeagent.edge.ledger import EpochLedger
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.node_rpc import MadeDisk
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.volume_ref import VolumeRef


class MemoryFiles:
    """The `RecordFiles` port in memory.

    A simulated node's state and guests end with its process. After a restart, the node is like a
    reinstalled node (F26).
    """

    def __init__(self) -> None:
        self._records: dict[str, VmRecord] = {}
        ledger = self._ledger = EpochLedger(Path())  # without `open`, the ledger writes no file
        self.epoch, self.left, self.refused = ledger.epoch, ledger.left, ledger.refused
        self.removed, self.seen = ledger.all_removed, ledger.seen
        self._commands: dict[str, Mapping[str, str]] = {}
        self._node_spec: NodeSpec | None = None
        self._nonce = ""

    async def write(self, record: VmRecord) -> None:
        self._ledger.acted(record.uid, record.epoch)
        self._records[record.uid] = record

    async def list(self) -> Mapping[str, VmRecord]:
        return dict(self._records)

    async def things(self) -> Mapping[str, tuple[str, ...]]:
        return {}

    async def commands(self, uid: str) -> Mapping[str, str]:
        return self._commands.get(uid, {})

    async def keep_commands(self, uid: str, results: Mapping[str, str]) -> None:
        self._commands[uid] = results

    async def remove_work(self, uid: str) -> None:
        self._commands.pop(uid, None)

    async def keep_work(self, uid: str, entry: str) -> None:
        """Do nothing: there are no seeds."""

    async def bring_back(self, entry: str, uid: str) -> None:
        """Do nothing: there are no seeds."""

    async def purge_kept(self, entry: str) -> None:
        """Do nothing: there are no seeds."""

    async def forget(self, uid: str, *, refused_epoch: int = 0) -> None:
        self._ledger.removed(uid, refused_epoch)
        self._records.pop(uid, None)

    def nonce(self) -> str:
        return self._nonce

    def set_nonce(self, nonce: str) -> None:
        self._nonce = nonce

    def node_spec(self) -> NodeSpec | None:
        return self._node_spec

    def set_node_spec(self, node_spec: NodeSpec | None) -> None:
        self._node_spec = node_spec

    async def new_boot(self, uid: str) -> None:
        """Do nothing: there is no log."""

    def console_socket(self, uid: str) -> Path:
        return Path(f"/simulated/{uid}/console.sock")

    def console_log(self, uid: str) -> Path:
        return Path(f"/simulated/{uid}/console.log")


class NoSeeds:
    """The `Seeds` port: simulated guests read no seeds."""

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None:
        """Do nothing."""

    def stand(self, record: VmRecord) -> bool:
        """Return True, because no seed is missing."""
        del record
        return True

    def paths(self, record: VmRecord) -> Mapping[str, Path]:
        return {
            volume.name: Path(f"/simulated/{record.uid}/seed-{volume.name}.iso")
            for volume in record.spec.volumes
            if volume.is_iso
        }

    def ignition_path(self, record: VmRecord) -> Path | None:
        return Path("/simulated") / record.uid / "ignition" if record.spec.ignition else None


class NoDisks:
    """The `DiskFiles` port: simulated guests open no disks."""

    async def sources(
        self, record: VmRecord, made: Mapping[str, MadeDisk], *, running: bool = False
    ) -> dict[str, DiskSource]:
        del running
        return disk_sources(Path("/simulated"), record, made)

    async def opened(self, uid: str, ref: VolumeRef) -> bool:
        del uid, ref
        return False

    def layer_pin(self, uid: str, volume: str, snapshot_uid: str) -> str:
        """Return a path that nobody opens."""
        return f"/simulated/{uid}/{volume}.{snapshot_uid}"

    async def pin_layer(self, uid: str, volume: str, disk: SnapshotDisk, snapshot_uid: str) -> None:
        """Do nothing."""

    async def unpin(self, pin: str) -> None:
        """Do nothing."""

    async def pin_backup(self, uid: str, disk: str, backup: str) -> str:
        """Return a name that no file has yet."""
        return f"/{uid}/{disk}.{backup}"

    async def unpin_backup(self, uid: str, backup: str) -> None:
        """Do nothing."""

    async def backup_pins(self) -> set[tuple[str, str]]:
        return set()

    async def protect_layers(self) -> bool:
        return False

    async def remove_layers(self, names: Sequence[str]) -> None:
        """Do nothing."""

    async def drop_media(self, uid: str, sources: Mapping[str, DiskSource]) -> None:
        """Do nothing."""
