"""Counts the requests by which imaged may copy or replace the disks of VMs that are off."""


class DiskWork:
    """The count of an agent. A VM's report of its disks is valid until the next such request."""

    def __init__(self) -> None:
        self.requests = 0

    def begin(self) -> None:
        """Count a request, which the caller then sends."""
        self.requests += 1
