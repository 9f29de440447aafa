"""Compares what VMs have on two hosts with what users asked for and the bus has claimed."""

import re
from collections import Counter
from collections.abc import Collection, Mapping

from tests.chaos.claims import Claims
from tests.chaos.lives import Life, Wanted
from tests.chaos.networks import FEW, Group
from tests.chaos.two_hosts import TwoHosts
from tests.e2e.platform import Json
from tests.hosts.fleet import STATE, Host

from virtbus.netd.core.attachment import Attachment

ANSWERED = "mesh", FEW, ""
"""The networks whose guests the host itself reaches."""
CONSOLE_BYTES = 500
Rule = tuple[str, int, tuple[str, ...]]
"""The direction, the port and the addresses of the peers."""


def attached(ground: TwoHosts) -> list[tuple[str, Attachment]]:
    """Return the networks of VMs on all hosts, with the name of the host."""
    found = []
    for host in ground.hosts.values():
        for path in host.box.path(STATE / "netd/vms").glob("*.json"):
            try:
                found.append((host.name, Attachment.model_validate_json(path.read_bytes())))
            except (OSError, ValueError):
                continue  # it is being removed
    return found


def given_twice(there: Collection[tuple[str, Attachment]]) -> list[str]:
    """Return VMs that two hosts have at once, and addresses that two VMs have."""
    hosts = Counter(one.uid for _, one in there)
    given = Counter(
        (nic.target.uid, address)
        for _, one in there
        for nic in one.nics
        if nic.target is not None
        for address in nic.addresses
    )
    twice = [f"{uid} is on two hosts" for uid, times in hosts.items() if times > 1]
    return twice + [f"{one} is given twice" for one, times in given.items() if times > 1]


class Placed:
    """The VMs of a moment: `views` are those of the API, by uid."""

    def __init__(self, ground: TwoHosts, claims: Claims, views: Mapping[str, Json]) -> None:
        self._ground = ground
        self._claims = claims
        self._views = views

    def _host(self, uid: str) -> Host:
        return self._ground.hosts[self._views[uid]["node"]]

    def _addresses(self, uid: str) -> list[str]:
        """Return the addresses of a VM that the bus has claimed or its status names."""
        shown = [
            address.partition("/")[0]
            for nic in self._views[uid].get("interfaces", ())
            for address in nic["addresses"]
        ]
        return sorted({*shown, *self._claims.of(uid)})

    # --- hosts ----------------------------------------------------------------------------
    def elsewhere(self, life: Life) -> list[str]:
        """Return what another host than the VM's own has of it."""
        own = self._views[life.uid]["node"]
        found = []
        for name, host in self._ground.hosts.items():
            runs = [*host.emulators().values()].count(life.uid)
            if runs != (life.wanted is Wanted.RUNNING and name == own):
                found.append(f"{life.name} of {own} has {runs} emulators on {name}")
            netns = host.box.path("/run/netns") / f"vb-{life.uid}"
            if name != own and netns.exists():
                found.append(f"{life.name} of {own} has a namespace on {name}")
        return found

    # --- addresses ------------------------------------------------------------------------
    def misaddressed(self, life: Life) -> list[str]:
        """Return how the guest's address differs from the one that it claims."""
        claimed, has = self._claims.of(life.uid), self._addresses(life.uid)
        if life.network and (len(claimed) != 1 or has != claimed):
            return [f"{life.name} has {has}, and claims {claimed}"]
        if life.wanted is not Wanted.RUNNING or life.network not in ANSWERED:
            return []
        (nic,) = self._views[life.uid]["interfaces"]
        box = self._host(life.uid).box
        box.run("ping", "-n", "-q", "-c", "1", "-W", "2", has[0], check=False)
        neighbour = box.run("ip", "neigh", "show", has[0], check=False)
        if nic["mac"] not in neighbour:
            said = box.path(STATE / f"consoles/{life.uid}.log").read_bytes()[-CONSOLE_BYTES:]
            return [f"no guest {nic['mac']} of {life.name} at {has[0]}: {neighbour}{said!r}"]
        return []

    # --- groups ---------------------------------------------------------------------------
    def misruled(
        self, life: Life, lives: Collection[Life], groups: Mapping[str, Group]
    ) -> list[str]:
        """Return how the rules in the kernel differ from the accepted ones of the VM's groups."""
        wanted: Counter[Rule] = Counter()
        for group in groups.values():
            for rule in group.rules if group.app == life.app else ():
                if names := rule.get("groups"):
                    peers = self._members(life, lives, [groups[name] for name in names])
                    wanted[rule["direction"], int(rule["ports"][0]), peers] += 1
        netns = f"vb-{life.uid}"
        listing = self._host(life.uid).box.run(
            *("ip", "netns", "exec", netns, "nft", "list", "table", "inet", "virtbus_groups"),
            check=False,
        )
        has = _rules(listing)
        if has != wanted:
            return [f"{life.name} has the rules {dict(has)}, and not {dict(wanted)}"]
        return []

    def _members(
        self, life: Life, lives: Collection[Life], groups: Collection[Group]
    ) -> tuple[str, ...]:
        """Return the addresses of groups' members that mean them at a VM's interface."""
        apps = {group.app for group in groups}
        node = self._views[life.uid]["node"]
        return tuple(
            sorted(
                address
                for one in lives
                if one.app in apps and one.network == life.network
                if life.network or self._views[one.uid]["node"] == node
                for address in self._addresses(one.uid)
            )
        )


def _rules(listing: str) -> Counter[Rule]:
    """Return the rules that name a group, as the kernel has them."""
    sets = {
        position: tuple(sorted(re.findall(r"\d+\.\d+\.\d+\.\d+", body)))
        for position, body in re.findall(r"set nic0-(\d+)-4 \{(.*?)\n\t\}", listing, re.DOTALL)
    }
    rules = re.findall(r"proto-dst (\w+) .*jump (ingress|egress)0-(\d+)$", listing, re.MULTILINE)
    return Counter((way, int(port, 0), sets[position]) for port, way, position in rules)
