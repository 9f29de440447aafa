"""Defines the answers of `Disks`."""

from dataclasses import dataclass

from virtbus.schemas.node_rpc import ImageReady, MadeDisk


@dataclass(frozen=True, slots=True)
class Ensured:
    """The answer of `Disks.ensure`; `made` is True if any disk was missing before."""

    ready: ImageReady
    made: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """The result of a release.

    `found` is True if there were disks. `kept` names the entry of the quarantine, if there is one.
    """

    found: bool
    kept: str = ""


@dataclass(frozen=True, slots=True)
class EnsuredDisk:
    """A disk that exists now. `made` is True if it was missing before.

    The disk rests on the image `digest`, which is empty for an empty disk.
    """

    file: MadeDisk
    digest: str
    made: bool
