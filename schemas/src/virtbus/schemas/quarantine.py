"""A node's quarantine: disks that no record accounts for, kept for a person (ADR 0033)."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import LenientModel, StrictModel
from virtbus.schemas.vm import VmRecord

ENTRY_PATTERN = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(\.[1-9][0-9]{0,3})?$"
"""An entry's name: the VM's uid. Further entries of the same uid have the suffix `.2`, `.3`, …."""
ENTRY = re.compile(ENTRY_PATTERN)
LIST_MAX = 500
ORPHANED = "virtbus.io/orphaned"
"""The annotation of a VM that its creator no longer knows; the value is the reason."""


class QuarantineRequest(LenientModel):
    """Lets a release move the disks to the quarantine. `record` is the VM's record, if known."""

    why: str
    record: VmRecord | None = None


class QuarantineEntry(LenientModel):
    """One entry of a quarantine, or (`held`) a VM without a record that is still on the node.

    `bytes` is the space that the VM's disks use, and `digests` are the disks' images. `adoptable`
    is True if the node has the VM's last record.
    """

    entry: str
    uid: str
    namespace: str = ""
    name: str = ""
    epoch: int = 0
    held: bool = False
    adoptable: bool = False
    disks: tuple[str, ...] = ()
    bytes: int = 0
    digests: tuple[str, ...] = ()
    why: str = ""
    since_ns: int = 0


class QuarantineWork(LenientModel):
    """`rpc.imaged.quarantine`: list all entries, or get, restore or purge one `entry`.

    `restore` makes the entry's disks those of the VM `uid`. Existing disks of `uid` are first moved
    into a new entry, which `keep` describes.
    """

    do: Literal["list", "get", "restore", "purge"]
    entry: str | None = Field(None, pattern=ENTRY_PATTERN)
    uid: str | None = None
    keep: QuarantineRequest | None = None


class Quarantine(LenientModel):
    """Entries of a node's quarantine. `record` is the saved record, after `get` and `adopt`."""

    entries: tuple[QuarantineEntry, ...] = ()
    total: int = 0
    record: VmRecord | None = None


class QuarantineAsk(LenientModel):
    """`rpc.agent.quarantine`. `name` and `new_uid` make an adopted entry a new VM.

    `keep` ends a guest without a record. With `below_epoch`, `keep` ends only a guest with a lower
    epoch: a controller knows that the VM has moved to another node at that epoch.
    """

    do: Literal["list", "adopt", "keep", "purge"]
    entry: str | None = Field(None, pattern=ENTRY_PATTERN)
    name: str | None = None
    new_uid: str | None = None
    below_epoch: int = 0


class NodeQuarantine(StrictModel):
    """`node.quarantine`: `entry` is an entry's name, as `do=list` shows it."""

    node: Id
    do: Literal["list", "adopt", "keep", "purge"] = "list"
    entry: str | None = Field(None, pattern=ENTRY_PATTERN)
    name: Id | None = Field(None, description="adopt it as a new VM of this name")

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.do != "list" and self.entry is None:
            msg = f"{self.do} needs an entry; do=list shows the entries"
            raise ValueError(msg)
        return self


class NodeQuarantined(LenientModel):
    """The answer of `node.quarantine`: the current entries, and the VM that was adopted."""

    node: str
    entries: tuple[QuarantineEntry, ...] = ()
    total: int = 0
    adopted: Uid | None = None
