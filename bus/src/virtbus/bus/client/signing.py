"""Signs each VM record that a controller writes (ADR 0032).

The signature is an HMAC-SHA-256 of node, uid and the encoded record without its signature. A host
stores the signature in its copy of the record. So a rebuild can verify that a controller wrote the
copy. Only controllers can read the keys, in `$KV.sec._signing`. A backup of the bus with secrets
contains the keys, too.
"""

import asyncio
import base64
import hmac
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from virtbus.bus.client.ports import Bus, Entry, EntryKind, WatchMark, Write
from virtbus.bus.errors import BusError, OutcomeUnknownError, UnavailableError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.hosts import SigningKey
from virtbus.schemas.record_signature import unsigned, with_signature
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

SEED_BYTES = 32
RETRY_S = 1.0
_TOMBSTONE = b"\xa9tombstone\xc3"


class Signer:
    """Signs and verifies records with one key. `id` is the key's public id."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            msg = f"a key has {SEED_BYTES} bytes"
            raise ValueError(msg)
        self._seed = seed
        self.id = hmac.digest(seed, b"virtbus key", "sha256").hex()[:8]

    def signed(self, node: str, uid: str, value: bytes) -> bytes:
        bare = unsigned(value)
        return with_signature(bare, self._text(node, uid, bare))

    def verifies(self, record: VmRecord) -> bool:
        bare = encode(record.model_copy(update={"signature": ""}))
        right = self._text(record.node, record.uid, bare)
        return hmac.compare_digest(record.signature.encode(errors="replace"), right.encode())

    def _text(self, node: str, uid: str, bare: bytes) -> str:
        signed_bytes = f"virtbus record\n{node}\n{uid}\n".encode() + bare
        signature = base64.urlsafe_b64encode(hmac.digest(self._seed, signed_bytes, "sha256"))
        return f"{self.id}:{signature.decode().rstrip('=')}"


class _Kept(NamedTuple):
    revision: int
    signer: Signer


class RecordKeys:
    """The signing keys that all controllers share. The first controller makes a key."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._signer: Signer | None = None
        self._one = asyncio.Lock()

    async def signer(self) -> Signer:
        """Return the signer with the oldest key; create a key if the bus has none.

        After a restore, a bus may have its own key and the backup's key. Signatures of both are
        valid. Raises BusError if the keys cannot be read or written.
        """
        if self._signer is None:
            async with self._one:
                kept = await self.listed()
                oldest = min(kept.values(), key=lambda each: each.revision, default=None)
                self._signer = oldest.signer if oldest is not None else await self._make()
        return self._signer

    async def prepare(self) -> None:
        """Read or create the key before the first record needs it."""
        while self._signer is None:
            try:
                await self.signer()
            except BusError as error:
                log.info("no signing key yet: %s", error, extra={"code": "signing_waits"})
                await asyncio.sleep(RETRY_S)

    async def _make(self) -> Signer:
        seed = self._bus.sources.secret(SEED_BYTES)
        signer = Signer(seed)
        key = subjects.signing_key(signer.id)
        value = SigningKey(seed=seed.hex(), created_ns=self._bus.sources.time_ns())
        try:
            await self._bus.put(key, encode(value), expect=0)
        except OutcomeUnknownError as error:  # the caller's own write was surely not sent
            message = f"{key}: {error}"
            raise UnavailableError(message) from error
        log.info("key %s signs records", signer.id, extra={"code": "signing_key"})
        return signer

    async def listed(self) -> Mapping[str, _Kept]:
        found: dict[str, _Kept] = {}
        async with self._bus.watch(subjects.signing_keys()) as watch:
            async for item in watch:
                if item is WatchMark.SYNCED:
                    break
                if item is WatchMark.RESET:
                    found = {}
                elif isinstance(item, Entry) and item.kind is EntryKind.PUT:
                    try:
                        signer = Signer(bytes.fromhex(read(SigningKey, item.value).seed))
                    except (VirtbusError, ValueError):
                        log.error("unreadable %s", item.key, extra={"code": "bad_record"})
                        continue
                    found[signer.id] = _Kept(item.revision, signer)
        return found

    async def good(self, records: Sequence[VmRecord]) -> set[tuple[str, str]]:
        """Return (node, uid) of each record with a valid signature."""
        kept = await self.listed()
        found = set()
        for record in records:
            key = kept.get(record.signature.partition(":")[0])
            if key is not None and key.signer.verifies(record):
                found.add((record.node, record.uid))
        return found


class SigningBus:
    """Wraps a bus and signs the VM records that it writes. All other calls are unchanged."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.keys = RecordKeys(bus)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def put(self, key: str, value: bytes, **more: Any) -> int:
        return await self._bus.put(key, await self._signed(key, value), **more)

    async def batch(self, writes: Sequence[Write]) -> int:
        signed = [
            one if one.value is None else one._replace(value=await self._signed(one.key, one.value))
            for one in writes
        ]
        return await self._bus.batch(signed)

    async def _signed(self, key: str, value: bytes) -> bytes:
        tokens = key.split(".")
        record = len(tokens) == 4 and key.startswith("$KV.vm.") and tokens[3][:1] != "_"
        if not record or _TOMBSTONE in value[:64]:
            return value
        signer = await self.keys.signer()
        return signer.signed(tokens[2], tokens[3], value)


def signing(bus: Bus) -> tuple[Bus, RecordKeys]:
    """Return a bus that signs VM records, and its keys."""
    made = SigningBus(bus)
    return cast("Bus", made), made.keys
