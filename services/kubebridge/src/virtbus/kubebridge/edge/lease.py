"""Election of one leading bridge by a Lease. The other bridges take the Lease when it is free.

Correctness does not depend on the election, because every write is made at the version that was
read (ADR 0026). The election only avoids conflicting writes. A bridge that cannot renew the Lease
continues to lead until another bridge has the Lease. A bridge without permission for Leases leads
without a Lease.

After an API server was restored to an older state, the version of the Lease is lower than at the
last read. By this, a bridge detects the restore.
"""

import asyncio
import logging
from collections.abc import Callable

from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.kubebridge.core.objects.unstructured import at, micro_stamp, text
from virtbus.kubebridge.core.runtime.controller import LEASE
from virtbus.kubebridge.edge.cluster import Json, KubernetesApi, StatusError

log = logging.getLogger(__name__)

NAME = "virtbus-kubebridge"
LASTS_S = 6.0
"""Seconds without a renewal after which a Lease is free, by the clock of the bridge that reads."""
RENEW_S = 2.0
GIVE_BACK_S = 2.0


class LeaseHolder:
    """Competes for the Lease while `run` runs. `leads` is set while this bridge leads."""

    def __init__(
        self,
        cluster: KubernetesApi,
        namespace: str,
        holder: str,
        leads: asyncio.Event,
        restored: Callable[[], None],
        sources: Sources = REAL,
    ) -> None:
        """`restored` is called after the API server was restored to an older state."""
        self._cluster = cluster
        self._namespace = namespace
        self._holder = holder
        self._sources = sources
        self._seen = ("", 0.0)
        self._restored = restored
        self._version = 0
        """The last known version of the Lease."""
        self.leads = leads

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._step()
                except StatusError as answer:
                    if answer.transient or answer.code == 409:
                        log.debug("lease: %s", answer)
                    elif not self.leads.is_set():
                        log.warning(
                            "no permission for a Lease, working without one: %s",
                            answer,
                            extra={"code": "no_lease"},
                        )
                        self.leads.set()
                await asyncio.sleep(self._sources.uniform(0.8, 1.2) * RENEW_S)
        finally:
            if self.leads.is_set():
                await self._give_back()

    async def _step(self) -> None:
        lease = await self._cluster.get(LEASE, NAME, self._namespace)
        self._note(lease)
        if lease is None:
            self._note(await self._cluster.create(LEASE, self._mine(None), self._namespace))
            self._hold()
        elif text(lease, "spec", "holderIdentity") in {self._holder, ""} or self._over(lease):
            self._note(await self._cluster.replace(LEASE, self._mine(lease)))
            self._hold()
        elif self.leads.is_set():
            log.warning("another bridge has the Lease", extra={"code": "lease_lost"})
            self.leads.clear()

    def _note(self, lease: Json | None) -> None:
        """Remember the Lease's version. A lower version than before proves a restored API server.

        A missing Lease counts as a lower version: it was deleted, or a restore lost it.
        """
        version = text(lease, "metadata", "resourceVersion")
        number = int(version) if version.isdigit() else 0
        before, self._version = self._version, number
        if number < before:
            self._restored()

    def _hold(self) -> None:
        if not self.leads.is_set():
            log.info("this bridge has the Lease", extra={"code": "lease_held"})
            self.leads.set()

    def _over(self, lease: Json) -> bool:
        """Return True if the Lease did not change for LASTS_S.

        The times in the Lease come from another bridge's clock, so they are ignored.
        """
        now_s, version = asyncio.get_running_loop().time(), lease["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > LASTS_S

    def _mine(self, before: Json | None) -> Json:
        """Return the Lease with this bridge as its holder.

        The Lease has the version that was read. Of several bridges, only one can write it.
        """
        now = micro_stamp(self._sources.now())
        ours = text(before, "spec", "holderIdentity") == self._holder
        switched = at(before, "spec", "leaseTransitions") or 0
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": int(LASTS_S),
            "acquireTime": at(before, "spec", "acquireTime") if ours else now,
            "renewTime": now,
            "leaseTransitions": switched if ours or before is None else switched + 1,
        }
        if before is not None:
            return {**before, "spec": spec}
        meta = {"name": NAME, "namespace": self._namespace}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}

    async def _give_back(self) -> None:
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                lease = await self._cluster.get(LEASE, NAME, self._namespace)
                if lease is not None and text(lease, "spec", "holderIdentity") == self._holder:
                    lease["spec"]["holderIdentity"] = ""
                    await self._cluster.replace(LEASE, lease)
        except (StatusError, TimeoutError) as error:
            log.debug("could not give the Lease back, it expires: %s", error)
