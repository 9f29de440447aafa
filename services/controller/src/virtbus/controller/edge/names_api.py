"""Handles `virtbus.ask.<node>.names`: nodes resolve names and addresses of VMs for their guests."""

import asyncio
import math

from virtbus.bus.client.ports import Request
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_names import Openings, addresses_of, answer, asker_of
from virtbus.schemas.names import NameAnswer, NameAsk
from virtbus.schemas.wire import validate

INDEX_FRESH_S = 5.0
"""Maximum age of the index of addresses. netd caches answers for the same time."""
STATUSES_A_STEP = 500
"""The indexing lets other tasks run after this number of statuses (0.5 ms of CPU)."""


class NamesApi:
    """Answers from the cached fleet; an answer has only VMs that the asking guest may know."""

    def __init__(self, fleet: Fleet, opened: Openings) -> None:
        self._fleet = fleet
        self._opened = opened
        self._by_address: dict[str, list[str]] = {}
        self._indexed_s = -math.inf
        self._indexing = asyncio.Lock()

    async def ask(self, request: Request) -> NameAnswer:
        want = validate(NameAsk, request.data)
        node = request.subject.split(".")[2]  # only the account of this node may use the subject
        asker = asker_of(self._fleet, node, want.uid)
        if want.address:
            await self._index()
            uids = self._by_address.get(want.address, [])
        else:
            uid = self._fleet.names.get((want.namespace, want.name))
            uids = [uid] if uid is not None else []
        return answer(self._fleet, uids, asker, self._opened, want.address)

    async def _index(self) -> None:
        """Rebuild the index of all addresses if it is older than INDEX_FRESH_S."""
        async with self._indexing:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._indexed_s < INDEX_FRESH_S:
                return
            found: dict[str, list[str]] = {}
            statuses = list(self._fleet.statuses.values())
            for start in range(0, len(statuses), STATUSES_A_STEP):
                for status, _revision in statuses[start : start + STATUSES_A_STEP]:
                    for address in addresses_of(status):
                        found.setdefault(address, []).append(status.uid)
                await asyncio.sleep(0)
            self._by_address, self._indexed_s = found, now_s
