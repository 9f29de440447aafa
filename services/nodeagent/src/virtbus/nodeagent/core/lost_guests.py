"""Builds the error about a lost guest: its QEMU runs, but libvirt does not know it (ADR 0061)."""

from virtbus.schemas.errors import Code, VirtbusError


def lost_message(pid: int) -> str:
    """Return an explanation for the user, with the next step."""
    return (
        f"libvirt has lost the guest, which runs on as process {pid} of its host: it is left "
        "alone; shut it down from inside, or `virtbus vm stop --force` ends it"
    )


def guest_lost(pid: int) -> VirtbusError:
    """Return 409 `guest_lost`."""
    return VirtbusError(Code.CONFLICT, "guest_lost", lost_message(pid))
