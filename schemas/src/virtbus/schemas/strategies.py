"""Defines the rules for running a VM, and for moving it off a node, with KubeVirt's words."""

from enum import StrEnum


class RunStrategy(StrEnum):
    """The rule for running the VM (KubeVirt's runStrategy)."""

    ALWAYS = "Always"
    RERUN_ON_FAILURE = "RerunOnFailure"
    ONCE = "Once"
    MANUAL = "Manual"
    HALTED = "Halted"


class EvictionStrategy(StrEnum):
    """The effect on a VM of a drain or a fence of its node (KubeVirt's evictionStrategy).

    A VM's disks are overlays on its node. A VM that moves starts again from its images, and loses
    what it has written. So a VM with writable disks and no strategy moves only if the request to
    drain or fence the node has `discard_local_disks`.
    """

    NONE = "None"
    """The VM is stopped and started on another node; its written disks are lost."""
    LIVE_MIGRATE = "LiveMigrate"
    """The VM leaves only by live migration, which virtbus does not support yet. So it stays."""
    LIVE_MIGRATE_IF_POSSIBLE = "LiveMigrateIfPossible"
    """The effect of None, as long as virtbus has no live migration."""
    EXTERNAL = "External"
    """The VM stays until an external controller moves it with `vm.move`."""
