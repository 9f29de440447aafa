"""Observes image names: a VM keeps one meaning that the bus had, however the name changes."""

from typing import TYPE_CHECKING

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.controller.core.image_name_changes import target_of
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.records import read_image_name
from virtbus.schemas.vm import VmRecord

if TYPE_CHECKING:
    from tests.sim.observer import Observer


class ImageNameObserver:
    """All meanings that names had on the bus, and those in the records of VMs."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer
        self._meanings: dict[str, list[ImageTarget]] = {}
        """By name: the meanings that were stored."""
        self._kept: dict[str, dict[str, ImageTarget]] = {}
        """By uid: the meanings in the VM's first record."""

    def wrote(self, entry: Entry) -> None:
        """A name was set or deleted."""
        if entry.kind is EntryKind.PUT:
            record = read_image_name(entry.key, entry.value)
            self._meanings.setdefault(record.name, []).append(target_of(record))

    def recorded(self, record: VmRecord) -> None:
        """A VM's record was written."""
        kept = self._kept.setdefault(record.uid, dict(record.image_targets))
        if kept != record.image_targets:
            self._observer.wrong("I2", f"{record.uid}: the meaning of its image changed")
        for name, target in record.image_targets.items():
            if target not in self._meanings.get(name, []):
                self._observer.wrong("I2", f"{record.uid}: {name} never had the meaning {target}")
