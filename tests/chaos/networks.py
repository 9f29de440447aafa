"""Networks with pools, and security groups that are made, changed and deleted during the faults."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.lives import APPS, END_S, insist
from tests.e2e.platform import Json

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import VirtbusError

FEW, FEW_ADDRESSES = "few", 2
POOLS: Mapping[str, Json] = {
    FEW: {"kind": "nat", "subnet": "10.213.0.0/24", "ranges": ["10.213.0.10-10.213.0.11"]},
    "mesh": {"kind": "overlay", "subnet": "10.214.0.0/16"},
    "inner": {"kind": "isolated", "subnet": "10.215.0.0/24"},
}
"""The networks by name; FEW has fewer addresses than there are VMs at once."""
GROUPS = 3


@dataclass
class Group:
    """One security group. `spec` is the last accepted one; None: there is no group."""

    name: str
    spec: Json | None = None

    @property
    def app(self) -> str | None:
        """Return the label of its members; None: it has none."""
        return self.spec["selector"]["labels"]["app"] if self.spec else None

    @property
    def rules(self) -> list[Json]:
        return self.spec["rules"] if self.spec else []


@dataclass
class Networks:
    """The networks, and all groups. `done` counts answered requests about groups."""

    seed: int
    simulate: bool
    uids: dict[str, str] = field(default_factory=dict)
    """Of the networks, by name."""
    groups: dict[str, Group] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)

    @property
    def pools(self) -> Mapping[str, Json]:
        """Return the networks; simulated nodes have no overlays."""
        overlay = {"mesh"} if self.simulate else set()
        return {name: spec for name, spec in POOLS.items() if name not in overlay}

    @property
    def drawn(self) -> Sequence[str]:
        """Return the networks that VMs draw from; empty: the network of the node."""
        return "", *self.pools, FEW, FEW

    async def make(self, admin: NatsBus) -> None:
        """Make the networks."""
        for name, spec in self.pools.items():
            pool = {} if spec["kind"] == "overlay" else {"pool": "fleet"}
            self.uids[name] = uuid7()
            data = {"name": name, "uid": self.uids[name], "spec": {**spec, **pool}}
            await insist(admin, "create", data, resource="network")

    async def run(self, bus: NatsBus, over: asyncio.Event) -> None:
        """Change the groups until `over`."""
        async with asyncio.TaskGroup() as group:
            for number in range(GROUPS):
                one = self.groups[f"group-{number}"] = Group(f"group-{number}")
                group.create_task(self._keep(bus, one, over))

    async def _keep(self, bus: NatsBus, one: Group, over: asyncio.Event) -> None:
        rng = random.Random(f"{self.seed}/{one.name}")
        while not over.is_set():
            spec = self._drawn(rng)
            more: Json = {"spec": spec}
            verb = "update"
            if one.spec is None:
                verb, more = "create", {"uid": uuid7(), "spec": spec}
            elif rng.random() < 0.3:
                verb, more = "delete", {}
            await insist(bus, verb, {"name": one.name, **more}, resource="security-group")
            one.spec = spec if more else None
            self.done[f"group {verb}"] += 1
            try:
                async with asyncio.timeout(rng.uniform(0.0, 8.0)):
                    await over.wait()
            except TimeoutError:
                continue

    def _drawn(self, rng: random.Random) -> Json:
        """Return a selector, and rules that name a group; everybody may ping a member."""
        rule: dict[str, Any] = {"protocol": "tcp", "groups": [f"group-{rng.randrange(GROUPS)}"]}
        rule["ports"] = [str(rng.randrange(1, 2**16))]
        rule["direction"] = rng.choice(("ingress", "ingress", "egress"))
        rules = [rule, {"direction": "ingress", "protocol": "icmp"}]
        return {"selector": {"labels": {"app": rng.choice(APPS)}}, "rules": rules}

    async def end(self, bus: NatsBus, admin: NatsBus) -> None:
        """Delete all groups, and the networks once no VM uses them."""
        for one in self.groups.values():
            if one.spec is not None:
                await insist(bus, "delete", {"name": one.name}, resource="security-group")
        async with asyncio.timeout(END_S):
            for name in self.pools:
                while not await self._deleted(admin, name):
                    await asyncio.sleep(0.5)

    async def _deleted(self, admin: NatsBus, name: str) -> bool:
        """Delete a network; return True once it is gone."""
        try:
            await insist(admin, "delete", {"name": name}, resource="network")
        except VirtbusError as error:
            if error.reason not in {"network_in_use", "network_not_found"}:
                raise
            return error.reason == "network_not_found"
        return False
