"""Stores the agent's files: a record for each VM, the epoch ledger, the join nonce, VERSION.

<state_dir>/VERSION            version of this layout
<state_dir>/node               the id of this node
<state_dir>/agent/ledger       highest epoch and removal of each uid (`ledger.py`)
<state_dir>/agent/nonce        the bus incarnation that this node joined
<state_dir>/agent/node_spec    the desired state of the node: cordoned, draining, fenced
<state_dir>/vms/<uid>/record   the desired record, without secrets
<state_dir>/vms/<uid>/commands results of the last commands
<state_dir>/vms/<uid>/frozen   the deadline of a frozen guest (`freeze_files.py`)
<state_dir>/vms/<uid>/seed-*   seeds
<state_dir>/vms/<uid>/disk-*   hard links to the VM's disks; also layer-*, backup-* (`disk_pins.py`)
<state_dir>/quarantine/<entry>/ the files of a VM whose disks are in quarantine (ADR 0033)
<run_dir>/vms/<uid>/           the console's socket
<state_dir>/consoles/<uid>.log the console's log
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from virtbus.bus.runtime import state_version
from virtbus.bus.runtime.settings import NODE_FILE
from virtbus.nodeagent.core.domain_xml import domain_name
from virtbus.nodeagent.edge.atomic_file import in_thread, replace, sync_dir, writing
from virtbus.nodeagent.edge.disk_pins import BACKUP_PIN, PINNED, disk_pins, drop_pins
from virtbus.nodeagent.edge.ledger import EpochLedger
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid, is_uid
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.quarantine import ENTRY
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

COMMANDS = "commands"
LIBVIRT_LOGS = Path("/var/log/libvirt/qemu")


class AgentFiles:
    """The `RecordFiles` port. Call `open` first; it refuses a second agent on one state folder."""

    def __init__(self, state_dir: Path, run_dir: Path) -> None:
        self._state = state_dir
        self._run = run_dir
        self._agent = state_dir / "agent"
        self.vms = state_dir / "vms"
        self._consoles = state_dir / "consoles"
        self._quarantine = state_dir / "quarantine"
        ledger = self._ledger = EpochLedger(self._agent / "ledger")
        self.epoch, self.left, self.refused = ledger.epoch, ledger.left, ledger.refused
        self.removed, self.seen = ledger.all_removed, ledger.seen
        self._lock: int | None = None

    def open(self, node: str) -> None:
        """Make the directories, take the lock, and read the ledger.

        Raises:
            VirtbusError: 409 `second_agent`: another agent holds the lock. 409 `other_node`: the
                state is that of another node id. 422 `state_newer` or `state_older`: the layout is
                of another version.
        """
        for path in (self._agent, self.vms, self._consoles, self._quarantine, self._run / "vms"):
            path.mkdir(mode=0o711, parents=True, exist_ok=True)
            path.chmod(0o711)
        self._lock = os.open(self._agent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another nodeagent works on {self._state}; stop it, or give --state-dir"
            raise VirtbusError(Code.CONFLICT, "second_agent", message) from None
        version = self._state / state_version.FILE
        if not state_version.check(self._state):
            replace(version, f"{SCHEMA_VERSION}\n".encode())
        version.chmod(0o644)  # imaged, which runs as another user, reads the file at its start
        self._check_node(node)
        for path in (*self._agent.glob(".*.part"), *self.vms.glob("*/.*.part")):
            path.unlink(missing_ok=True)  # an agent that was killed has left the file
        self._ledger.open()

    def close(self) -> None:
        self._ledger.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_node(self, node: str) -> None:
        path = self._state / NODE_FILE
        kept = path.read_text().strip() if path.exists() else ""
        if not kept:
            replace(path, f"{node}\n".encode())
        elif kept != node:
            message = (
                f"{self._state} belongs to node {kept}, not {node}; "
                f"start with --node {kept}, or give another --state-dir"
            )
            raise VirtbusError(Code.CONFLICT, "other_node", message)

    # --- records --------------------------------------------------------------------------
    async def write(self, record: VmRecord) -> None:
        """Write the record and its epoch durably.

        The ledger is written first, because a ledger entry without a record is harmless.
        """
        folder = self.vms / check_uid(record.uid)
        self._ledger.acted(record.uid, record.epoch)

        def save() -> None:
            folder.mkdir(mode=0o711, exist_ok=True)
            folder.chmod(0o711)
            (self._run / "vms" / record.uid).mkdir(mode=0o711, parents=True, exist_ok=True)
            self._ledger.save(record.uid)
            data = encode(record)
            if not _holds(folder / "record", data):
                replace(folder / "record", data)
            drop_pins(self._state, record, running=True)

        await self._change(save)

    async def _change(self, work: Callable[[], None]) -> None:
        """Run `work`, which writes files, in a thread; raise VirtbusError 503 `state_write`."""
        with writing(self._state):
            await in_thread(work)

    async def list(self) -> dict[str, VmRecord]:
        def load() -> dict[str, VmRecord]:
            found = {}
            for path in sorted(self.vms.glob("*/record")):
                try:
                    record = read(VmRecord, path.read_bytes())
                    _same_uid(record, path)
                except (OSError, VirtbusError) as error:
                    log.error("unreadable %s: %s", path, error, extra={"code": "bad_record_file"})
                    continue
                found[record.uid] = record
            return found

        return await in_thread(load)

    async def things(self) -> dict[str, tuple[str, ...]]:
        """Return the paths of VMs' folders and console logs, by the uid in their names."""

        def find() -> dict[str, tuple[str, ...]]:
            paths = [*self.vms.iterdir(), *(self._run / "vms").iterdir()]
            found: dict[str, tuple[str, ...]] = {}
            for path in (*paths, *self._consoles.iterdir()):
                uid = path.name.partition(".")[0]
                found[uid] = (*found.get(uid, ()), str(path))
            return {uid: these for uid, these in found.items() if is_uid(uid)}

        return await in_thread(find)

    async def commands(self, uid: str) -> dict[str, str]:
        path = self.vms / check_uid(uid) / COMMANDS

        def load() -> dict[str, str]:
            try:
                results = json.loads(path.read_bytes())
                return {str(one): str(state) for one, state in results.items()}
            except FileNotFoundError:
                return {}
            except (OSError, ValueError, AttributeError) as error:
                log.error("unreadable commands: %s", error, extra={"code": "bad_command_file"})
                return {}

        return await in_thread(load)

    async def keep_commands(self, uid: str, results: Mapping[str, str]) -> None:
        path = self.vms / check_uid(uid) / COMMANDS

        def save() -> None:
            if path.parent.is_dir():  # without this folder, the VM has left this host
                replace(path, json.dumps(dict(results)).encode())

        await self._change(save)

    async def remove_work(self, uid: str) -> None:
        def remove() -> None:
            with contextlib.suppress(OSError):  # libvirt itself never deletes these logs
                for path in LIBVIRT_LOGS.glob(f"{domain_name(check_uid(uid))}*.log*"):
                    path.unlink(missing_ok=True)  # also the logs of virtiofsd
            for pattern in ("seed-*", ".seed-*", f"{PINNED}*", f"{BACKUP_PIN}*"):
                for path in (self.vms / check_uid(uid)).glob(pattern):
                    path.unlink(missing_ok=True)
            shutil.rmtree(self._run / "vms" / uid, ignore_errors=True)
            for path in self._consoles.glob(f"{uid}.log*"):
                path.unlink(missing_ok=True)

        await self._change(remove)

    async def keep_work(self, uid: str, entry: str) -> None:
        folder, kept = self.vms / check_uid(uid), self._kept(entry)

        def keep() -> None:
            if not folder.is_dir():
                return
            for path, _, of_layer in disk_pins(folder):  # a volume with two links is unusable
                if not of_layer or path.lstat().st_nlink > 1:  # a layer keeps its last name
                    path.unlink(missing_ok=True)
            shutil.rmtree(kept, ignore_errors=True)
            folder.rename(kept)
            sync_dir(kept.parent)
            sync_dir(self.vms)

        await self._change(keep)

    async def bring_back(self, entry: str, uid: str) -> None:
        kept, folder = self._kept(entry), self.vms / check_uid(uid)

        def bring() -> None:
            for path in kept.glob("seed-*"):
                path.rename(folder / path.name)
            sync_dir(folder)
            shutil.rmtree(kept, ignore_errors=True)

        await self._change(bring)

    async def purge_kept(self, entry: str) -> None:
        kept = self._kept(entry)
        await self._change(lambda: shutil.rmtree(kept, ignore_errors=True))

    def _kept(self, entry: str) -> Path:
        if not ENTRY.fullmatch(entry):
            raise VirtbusError(Code.INVALID, "no_entry", f"{entry[:60]!r} is no entry")
        return self._quarantine / entry

    async def forget(self, uid: str, *, refused_epoch: int = 0) -> None:
        self._ledger.removed(check_uid(uid), refused_epoch)

        def remove() -> None:
            shutil.rmtree(self.vms / uid, ignore_errors=True)
            sync_dir(self.vms)
            self._ledger.save(uid)

        await self._change(remove)

    # --- the joined bus --------------------------------------------------------------------------
    def nonce(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._agent / "nonce").read_text().strip()
        return ""

    def set_nonce(self, nonce: str) -> None:
        replace(self._agent / "nonce", f"{nonce}\n".encode())

    def node_spec(self) -> NodeSpec | None:
        try:
            return read(NodeSpec, (self._agent / "node_spec").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, VirtbusError) as error:
            log.error("unreadable desired node state: %s", error, extra={"code": "bad_wish_file"})
            return None

    def set_node_spec(self, node_spec: NodeSpec | None) -> None:
        path = self._agent / "node_spec"
        try:
            if node_spec is None:
                path.unlink(missing_ok=True)
            elif not _holds(path, data := encode(node_spec)):
                replace(path, data)
        except OSError as error:
            log.error(
                "cannot write the desired node state: %s", error, extra={"code": "state_write"}
            )

    async def new_boot(self, uid: str) -> None:
        log = self.console_log(uid)
        with contextlib.suppress(FileNotFoundError):
            await in_thread(lambda: log.replace(log.with_name(f"{log.name}.previous")))

    # --- consoles -------------------------------------------------------------------------
    def console_socket(self, uid: str) -> Path:
        return self._run / "vms" / check_uid(uid) / "console.sock"

    def console_log(self, uid: str) -> Path:
        return self._consoles / f"{check_uid(uid)}.log"


def _holds(path: Path, data: bytes) -> bool:
    """Return True if the file has this content. The caller then saves an fsync."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _same_uid(record: VmRecord, path: Path) -> None:
    if record.uid != path.parent.name:
        raise VirtbusError(Code.INVALID, "bad_record_file", f"holds the record of {record.uid}")
