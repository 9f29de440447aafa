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
    """The result of a release. `found`: there were disks; `kept`: the quarantine entry, if any."""

    found: bool
    kept: str = ""


@dataclass(frozen=True, slots=True)
class EnsuredDisk:
    """An existing disk, on the image `digest` (empty for an empty disk); `made`: just created."""

    file: MadeDisk
    digest: str
    made: bool
