"""Changes the secrets in a VM's first-boot data, which are in another bucket than its record.

The controller first stores the new secrets together with the secrets that they replace. Then it
writes their digest to the record. After a crash in between, the record still has the digest of the
former secrets, and the node uses the former secrets.
"""

import re
from typing import NamedTuple

from virtbus.bus.client.ports import Bus, EntryKind
from virtbus.controller.core.mutations import changed_paths
from virtbus.controller.core.secret_inputs import MAX_BYTES, without_secrets
from virtbus.controller.core.seed_changes import (
    OF_A_SEED,
    merged,
    network_findings,
)
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Detail, Retry, VirtbusError
from virtbus.schemas.records import read_stored
from virtbus.schemas.secrets_in_force import (
    digest_of,
    encoded_in_force,
    in_force,
    without_replaced,
)
from virtbus.schemas.vm import VmRecord, VmSecrets, VmSpec
from virtbus.schemas.wire import encode, invalid


class SeedChange(NamedTuple):
    """The spec without secrets; the new secrets, None if they do not change.

    `revision` is the revision of the stored secrets (0: none).
    """

    spec: VmSpec
    secrets: VmSecrets | None = None
    revision: int = 0


class SeedUpdates:
    """Computes and stores updates of first-boot data."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def wanted(self, record: VmRecord, spec: VmSpec) -> SeedChange:
        """Return the change of first-boot data that an update with this spec requests.

        Raises:
            VirtbusError:
                400: the network data is invalid.
                503 `secrets_lost`: the bus lacks the VM's secrets. So the secrets that the spec
                omits cannot be taken over, and would be lost.
        """
        public = without_secrets(spec)
        before, after = (one.model_dump(mode="json") for one in (record.spec, public))
        shown = any(re.match(OF_A_SEED, path) for path in changed_paths(before, after, "spec"))
        if not shown and public == spec:
            return SeedChange(public)
        wrong = tuple(
            Detail(path=path, message=problem)
            for path, findings in network_findings(spec.volumes)
            for problem in findings.problems
        )
        if wrong:
            raise invalid(wrong)
        key, replaced = subjects.vm_secret(record.node, record.uid), b""
        entry = await self._bus.get(key)
        if record.sec_digest is not None:
            if entry is not None and entry.kind is EntryKind.PUT:
                replaced = encoded_in_force(key, entry.value, record.sec_digest) or b""
            if not replaced:
                message = "the bus does not have the VM's secrets now; repeat the update later"
                raise VirtbusError(Code.UNAVAILABLE, "secrets_lost", message)
        old = read_stored(VmSecrets, key, replaced) if replaced else None
        new = merged(record, old, spec)
        if encode(new) == without_replaced(old or VmSecrets(uid=record.uid)):
            return SeedChange(public)
        secrets = new.model_copy(update={"replaced": replaced})
        return SeedChange(public, secrets, entry.revision if entry is not None else 0)

    async def store(self, record: VmRecord, change: SeedChange) -> VmRecord:
        """Store the secrets of a change; return the record with their digest.

        Raises:
            VirtbusError: 413: the new and the replaced secrets together are too large.
            ConflictError: the secrets were changed meanwhile.
        """
        if change.secrets is None:
            return record
        body = encode(change.secrets)
        if len(body) > MAX_BYTES:
            message = (
                f"the new first-boot data and those that they replace have {len(body)} bytes; "
                f"{MAX_BYTES} at most. Make them smaller, or create the VM again"
            )
            raise VirtbusError(Code.TOO_LARGE, "secrets_too_large", message)
        key = subjects.vm_secret(record.node, record.uid)
        await self._bus.put(key, body, expect=change.revision)
        return record.model_copy(update={"sec_digest": digest_of(change.secrets)})


async def secrets_of(bus: Bus, record: VmRecord) -> VmSecrets:
    """Return the secrets in force: those whose digest is in `record`.

    Raises:
        VirtbusError: 503 `secrets_lost`: the bus lacks them now, for example during a move.
    """
    key = subjects.vm_secret(record.node, record.uid)
    entry = await bus.get(key)
    secrets = None
    if entry is not None and entry.kind is EntryKind.PUT:
        secrets = in_force(key, entry.value, record.sec_digest or "")
    if secrets is None:
        message = f"the bus does not have the secrets of {record.name} now; repeat the request"
        raise VirtbusError(
            Code.UNAVAILABLE, "secrets_lost", message, retry=Retry.SAME_ID, after_ms=1000
        )
    return secrets
