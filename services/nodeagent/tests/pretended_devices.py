"""The devices of a pretended guest: its live XML, and the NICs of its start."""

import copy
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.schemas.errors import VirtbusError


class Devices:
    """The `LiveDevices` port: the XML of each domain, and a guest that releases devices or not."""

    def __init__(self, there: dict[str, DomainFacts], done: list[tuple[str, str]]) -> None:
        self._there = there
        self._done = done
        self.defined: dict[str, ET.Element] = {}
        self._live: dict[str, ET.Element] = {}
        self._unknown: dict[str, set[int]] = {}
        self.silent = False
        """True: guests release no device."""
        self.errors: dict[str, VirtbusError] = {}
        """The error of a call, by its name."""

    def started(self, of: str) -> None:
        """A guest starts with the devices of its definition."""
        self._live[of] = copy.deepcopy(self.defined[of])
        facts = self._there[of]
        self._unknown[of] = set(range(len(facts.metadata.nics if facts.metadata else ())))

    def nics(self, of: str) -> list[str]:
        """The names of the guest's NICs, those of its start as numbers."""
        aliases = self._live[of].findall("devices/interface/alias")
        plugged = [one.get("name", "").split("-", 3)[3] for one in aliases]
        return [*map(str, sorted(self._unknown[of])), *plugged]

    async def live_xml(self, of: str) -> str | None:
        self._called("live_xml")
        facts = self._there.get(of)
        active = facts is not None and facts.active
        return ET.tostring(self._live[of], encoding="unicode") if active else None

    async def attach(self, of: str, xmls: Sequence[str]) -> None:
        self._called("attach")
        devices = self._live[of].find("devices")
        assert devices is not None
        devices.extend(map(ET.fromstring, xmls))
        self._done.append(("attach", of))

    async def detach(self, of: str, alias: str) -> None:
        self._called("detach")
        self._done.append(("detach", of))
        devices = self._live[of].find("devices")
        assert devices is not None
        for one in devices.findall("interface"):
            found = one.find("alias")
            if found is not None and found.get("name") == alias and not self.silent:
                devices.remove(one)

    async def detach_unknown(self, of: str, number: int) -> None:
        self._done.append((f"detach {number}", of))
        if not self.silent:
            self._unknown[of].discard(number)

    async def has_unknown(self, of: str, number: int) -> bool:
        return number in self._unknown[of]

    def _called(self, verb: str) -> None:
        if verb in self.errors:
            raise self.errors[verb]
