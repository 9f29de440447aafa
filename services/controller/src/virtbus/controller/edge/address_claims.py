"""Claims the addresses of a VM's interfaces before the VM's record is committed (ADR 0064)."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.address_plan import (
    Need,
    exhausted,
    kept_claims,
    needs,
    refuse_hosts,
    refuse_static,
)
from virtbus.controller.core.claims import AddressTakenError, addresses_of, claim_value
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.quotas import Quota
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.commit import Commits
from virtbus.controller.edge.key_states import holder_of
from virtbus.controller.edge.living_claims import LivingClaims
from virtbus.schemas import subjects
from virtbus.schemas.address_pool import AddressPool
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import ON_SEGMENTS
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)


class AddressClaims:
    """Chooses and claims addresses. After a crash, a sweep frees claims that no record has."""

    def __init__(self, bus: Bus, fleet: Fleet, quota: Quota, living: LivingClaims) -> None:
        self._bus = bus
        self._fleet = fleet
        self._quota = quota
        self._commits = Commits(bus, fleet)
        self._living = living

    async def claim(self, record: VmRecord, before: VmRecord | None = None) -> VmRecord:
        """Claim the addresses that the record's interfaces need; return the record with all claims.

        Interfaces that the record `before` also has keep their claims.

        Raises:
            VirtbusError:
                400: a static address is not in its network.
                409: another VM or a host has a static address, or an interface of that name is
                still being removed.
                429: a pool or quota is exhausted.
                503: a host with a heartbeat does not answer, or too many races were lost.
            BusError: a sweep will free the claims that were made before the error.
        """
        refuse_static(record.spec, record.network_targets)
        kept = kept_claims(before)
        wanted = needs(record, kept)
        if not wanted:
            return record.model_copy(update={"address_claims": kept}) if kept else record
        withheld = await self._living.withheld()
        self._refuse_more(wanted)
        claims = kept | {need.nic.name: need.static for need in wanted}
        record = record.model_copy(update={"address_claims": claims})
        done = record.model_copy(update={"address_claims": kept})
        try:
            for need in wanted:
                refuse_hosts(need, self._hosts(need))
                done = _with(done, need, ())
                for address in (*need.static.addresses, *filter(None, (need.static.mac,))):
                    await self._claim_static(need, address, record, withheld)
                    done = _with(done, need, (address,))
                for pool in need.open_pools():
                    done = await self._claim_any(need, pool, done, withheld)
        except VirtbusError:
            await self.give_back(done, before)
            raise
        return done

    async def give_back(self, record: VmRecord, before: VmRecord | None = None) -> None:
        """Free the claims of a refused record; keep those of the record `before`."""
        kept = set(addresses_of(before)) if before is not None else set()
        for key in addresses_of(record):
            if key in kept:
                continue
            try:
                with suppress(ConflictError):
                    await self._commits.free_claim(key)
            except (BusError, VirtbusError) as error:
                extra = {"code": "claim_left", "uid": record.uid}
                log.info("left to the sweep: %s", error, extra=extra)

    async def _claim_static(
        self, need: Need, address: str, record: VmRecord, withheld: Mapping[str, str]
    ) -> None:
        """Claim a static address, which the spec names."""
        key = subjects.address_claim(need.static.network, address)
        if withheld.get(key, record.uid) != record.uid:
            raise AddressTakenError(record, key, withheld[key])
        await self._commits.claim_key(key, record, renew=True)

    async def _claim_any(
        self, need: Need, pool: AddressPool, done: VmRecord, withheld: Mapping[str, str]
    ) -> VmRecord:
        """Claim a free address of the pool; return `done` with this claim."""
        network = need.target.uid
        of_hosts = _addresses(network, withheld, but=done.uid)
        taken = {*self._fleet.addresses.taken(network), *of_hosts, *self._hosts(need)}
        for _ in range(ATTEMPTS):
            address = pool.choose(
                f"{done.uid}/{need.nic.name}", taken, self._fleet.addresses.freed(network)
            )
            if address is None:
                raise exhausted(need, pool, of_hosts)
            if await self._take(subjects.address_claim(network, str(address)), done.uid):
                return _with(done, need, (str(address),))
            taken.add(str(address))
        raise contended(f"the addresses of {need.target.name}")

    def _hosts(self, need: Need) -> dict[str, str]:
        """Return the addresses that hosts may have in a network, with their nodes."""
        if need.target.spec.kind not in ON_SEGMENTS:
            return {}  # no host has an address in such a subnet
        seen = self._fleet.nodes.items()
        return {address: node for node, one in seen for address in one.record.addresses}

    async def _take(self, key: str, uid: str) -> bool:
        """Claim an address that seems to be free; return False if another VM has claimed it."""
        body, expect = encode(claim_value(key, uid)), 0
        for _ in range(ATTEMPTS):
            try:
                await self._bus.put(key, body, expect=expect)
            except ConflictError:
                entry = await self._bus.get(key)
                if holder_of(entry) not in {None, uid}:
                    return False
                expect = entry.revision if entry is not None else 0
            else:
                return True
        return False

    def _refuse_more(self, wanted: Iterable[Need]) -> None:
        """Raise 429 if more claims would exceed a quota."""
        for need in wanted:
            where = f"the network {need.target.name}"
            why = self._quota.full(self._fleet.addresses, need.target.uid, "addresses", one=where)
            if why:
                message = f"{need.path}.name: {why}; delete VMs that have some, then repeat"
                detail = Detail(path=f"{need.path}.name", message=why)
                raise VirtbusError(
                    Code.EXHAUSTED, "address_quota", message, details=(detail,), after_ms=10_000
                )


def _with(record: VmRecord, need: Need, more: tuple[str, ...]) -> VmRecord:
    """Return the record with more claims of the interface of `need`."""
    empty = need.static.model_copy(update={"addresses": (), "mac": ""})
    claims = record.address_claims.get(need.nic.name, empty)
    macs = [text for text in more if text == need.static.mac]
    update = {
        "addresses": (*claims.addresses, *(text for text in more if text not in macs)),
        "mac": macs[0] if macs else claims.mac,
    }
    new = {**record.address_claims, need.nic.name: claims.model_copy(update=update)}
    return record.model_copy(update={"address_claims": new})


def _addresses(network: str, withheld: Mapping[str, str], *, but: str) -> set[str]:
    """Return a network's addresses in `withheld`, without those of the VM `but`.

    Only hosts know the addresses in `withheld`.
    """
    of_others = (subjects.claimed_address(key) for key, uid in withheld.items() if uid != but)
    return {address for there, address in of_others if there == network}
