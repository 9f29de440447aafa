"""libvirt's errors as ours: one table, and the cause in the emulator's own words."""

import re

import libvirt

from virtbus.schemas.errors import Code, VirtbusError

DOWN = frozenset(
    {
        libvirt.VIR_ERR_RPC,
        libvirt.VIR_ERR_NO_CONNECT,
        libvirt.VIR_ERR_INVALID_CONN,
        libvirt.VIR_ERR_SYSTEM_ERROR,
    }
)
_TABLE: dict[int, tuple[Code, str]] = {
    libvirt.VIR_ERR_NO_DOMAIN: (Code.NOT_FOUND, "no_domain"),
    libvirt.VIR_ERR_OPERATION_INVALID: (Code.CONFLICT, "domain_state"),
    libvirt.VIR_ERR_OPERATION_TIMEOUT: (Code.UNAVAILABLE, "domain_busy"),
    libvirt.VIR_ERR_XML_ERROR: (Code.UNSUPPORTED, "domain_refused"),
    libvirt.VIR_ERR_XML_DETAIL: (Code.UNSUPPORTED, "domain_refused"),
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED: (Code.UNSUPPORTED, "domain_unsupported"),
}
_QEMU_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z\s+\S+?:\s*")


def cause(text: str) -> str:
    """The line of libvirt's message that says why: the emulator's own last one, if it is there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _QEMU_STAMP.sub("", lines[-1]) if lines else "libvirt gave no reason"


def translated(error: libvirt.libvirtError, doing: str) -> VirtbusError:
    """`error` as a VirtbusError that says what was tried."""
    code = error.get_error_code()
    text = cause(error.get_error_message() or str(error))
    if code in DOWN:
        message = f"libvirt does not answer ({text}); start libvirtd, guests run on meanwhile"
        return VirtbusError(Code.UNAVAILABLE, "libvirt_down", message, after_ms=1000)
    kind, reason = _TABLE.get(code, (Code.INTERNAL, "libvirt_failed"))
    return VirtbusError(kind, reason, f"{doing}: {text}")
