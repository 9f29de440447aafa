"""The states of a VM as users see them.

The agent reports one of these states in the status. The controller may show another state instead:
a table in `virtbus.controller.core.vm_states` decides.
"""

from enum import StrEnum


class VmState(StrEnum):
    """The states that `virtbus vm list` shows."""

    PENDING = "Pending"
    SCHEDULED = "Scheduled"
    PREPARING = "Preparing"
    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"
    DELETING = "Deleting"
