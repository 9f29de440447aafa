"""Cache of the security groups that this bridge owns on the bus. Only the leader lists them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.kubebridge.core.policy.translation import POLICY_LABEL
from virtbus.kubebridge.core.runtime.controller import Notify
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.security_group_api import (
    SecurityGroupCreate,
    SecurityGroupCreated,
    SecurityGroupDelete,
    SecurityGroupList,
    SecurityGroupPage,
    SecurityGroupUpdate,
    SecurityGroupView,
)
from virtbus.schemas.subjects import api
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

Request = SecurityGroupCreate | SecurityGroupUpdate | SecurityGroupDelete
LOOK_S = 30.0
TIMEOUT_S = 10.0


class BusGroups:
    """The groups, by the namespace of their NetworkPolicy and the value of their POLICY_LABEL.

    The bus lists only the groups that this bridge owns.
    """

    def __init__(self, bus: Bus, leads: asyncio.Event, interval_s: float = LOOK_S) -> None:
        self._bus = bus
        self._leads = leads
        self._interval_s = interval_s
        self._groups: dict[tuple[str, str], dict[str, SecurityGroupView]] = {}
        self.current = False
        """True once a list has succeeded."""
        self.notify: Notify = lambda _: None

    def of(self, namespace: str, label: str) -> Mapping[str, SecurityGroupView]:
        return self._groups.get((namespace, label), {})

    def paths(self) -> Iterable[str]:
        return [f"{namespace}/{label}" for namespace, label in self._groups]

    def known(self, request: Request) -> SecurityGroupView | None:
        for (namespace, _), groups in self._groups.items():
            if namespace == request.namespace and request.name in groups:
                return groups[request.name]
        return None

    def answered(self, request: Request, reply: Any) -> None:
        """Update the cache after `request` succeeded with the answer `reply`."""
        for (namespace, _), groups in self._groups.items():
            if namespace == request.namespace:
                groups.pop(request.name, None)
        if isinstance(request, SecurityGroupDelete):
            return
        created = isinstance(request, SecurityGroupCreate)
        view = (
            validate(SecurityGroupCreated, reply).group
            if created
            else validate(SecurityGroupView, reply)
        )
        self._groups.setdefault(_place(view), {})[view.name] = view

    async def refresh(self) -> None:
        """List the groups now.

        Raises:
            BusError: the bus did not answer.
            VirtbusError: the bus refused the request, or its answer is invalid.
        """
        found: dict[tuple[str, str], dict[str, SecurityGroupView]] = {}
        async for view in self._listed():
            if POLICY_LABEL in view.labels:
                found.setdefault(_place(view), {})[view.name] = view
        before, self._groups = self._groups, found
        self.current = True
        for place in sorted(before.keys() | found.keys()):
            if before.get(place) != found.get(place):
                self.notify("/".join(place))

    async def run(self) -> None:
        while True:
            await self._leads.wait()
            try:
                await self.refresh()
            except (BusError, VirtbusError) as error:
                log.warning("groups: %s; retrying", error, extra={"code": "group_list_failed"})
            await asyncio.sleep(self._interval_s)

    async def _listed(self) -> AsyncIterator[SecurityGroupView]:
        ask = SecurityGroupList()
        while True:
            answer = await self._bus.request(
                api("security-group", "list"), ask, timeout_s=TIMEOUT_S
            )
            page = validate(SecurityGroupPage, answer)
            for view in page.items:
                yield view
            if page.continue_ is None or not page.items:
                return
            ask = SecurityGroupList.model_validate({"continue": page.continue_})


def _place(view: SecurityGroupView) -> tuple[str, str]:
    return view.namespace, view.labels.get(POLICY_LABEL, "")
