"""Says what happened to a guest that libvirt has lost: its QEMU runs on (ADR 0061)."""

from virtbus.schemas.errors import Code, VirtbusError


def lost_message(pid: int) -> str:
    """Return what happened to a guest that libvirt has lost, and the next step."""
    return (
        f"libvirt has lost the guest, which runs on as process {pid} of its host: it is left "
        "alone; shut it down from inside, or `virtbus vm stop --force` ends it"
    )


def guest_lost(pid: int) -> VirtbusError:
    """Return 409: the guest runs, but libvirt does not know it."""
    return VirtbusError(Code.CONFLICT, "guest_lost", lost_message(pid))
