"""Counts requests that let imaged copy or replace the disks of VMs that are off."""


class DiskWork:
    """An agent's count. A VM's report of its disks is valid until the next such request."""

    def __init__(self) -> None:
        self.requests = 0

    def begin(self) -> None:
        """Count a request before the caller sends it."""
        self.requests += 1
