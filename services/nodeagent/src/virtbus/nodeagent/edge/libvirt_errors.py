"""Translates libvirt's errors to VirtbusError, with the cause that QEMU printed."""

import re

import libvirt

from virtbus.schemas.errors import Code, VirtbusError

_RPC = frozenset({libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE, libvirt.VIR_FROM_STREAMS})
_TABLE: dict[int, tuple[Code, str]] = {
    libvirt.VIR_ERR_NO_DOMAIN: (Code.NOT_FOUND, "no_domain"),
    libvirt.VIR_ERR_OPERATION_INVALID: (Code.CONFLICT, "domain_state"),
    libvirt.VIR_ERR_OPERATION_TIMEOUT: (Code.UNAVAILABLE, "domain_busy"),
    libvirt.VIR_ERR_OPERATION_FAILED: (Code.CONFLICT, "domain_conflict"),
    libvirt.VIR_ERR_DOM_EXIST: (Code.CONFLICT, "domain_conflict"),
    libvirt.VIR_ERR_XML_ERROR: (Code.UNSUPPORTED, "domain_refused"),
    libvirt.VIR_ERR_XML_DETAIL: (Code.UNSUPPORTED, "domain_refused"),
    libvirt.VIR_ERR_XML_INVALID_SCHEMA: (Code.UNSUPPORTED, "domain_refused"),
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED: (Code.UNSUPPORTED, "domain_unsupported"),
    libvirt.VIR_ERR_NO_SUPPORT: (Code.UNSUPPORTED, "domain_unsupported"),
    libvirt.VIR_ERR_ACCESS_DENIED: (Code.DENIED, "libvirt_denied"),
    libvirt.VIR_ERR_AUTH_FAILED: (Code.DENIED, "libvirt_denied"),
    libvirt.VIR_ERR_NO_MEMORY: (Code.EXHAUSTED, "no_memory"),
    libvirt.VIR_ERR_RESOURCE_BUSY: (Code.UNAVAILABLE, "domain_busy"),
}
_AGENT = frozenset({libvirt.VIR_ERR_AGENT_UNRESPONSIVE, libvirt.VIR_ERR_AGENT_UNSYNCED})
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z\s+\S+?:\s*")
_PREFIXES = re.compile(
    r"^(?:internal error: |operation failed: |unsupported configuration: |"
    r"(?:process exited while connecting to monitor|qemu unexpectedly closed the monitor): )+"
)
_WRAPPER = re.compile(r"^(?:vmwrapper: )?(recovering|[a-z][a-z0-9]*(?:_[a-z0-9]+)+): (.+)$")
"""vmwrapper's line for an error of vmwrapper or netd: `reason: cause; next step`."""
_LATER = re.compile(r"^(?:recovering|not_armed|netd_\w+|\w+_(?:down|late|timeout))$")
"""Reasons of vmwrapper after which a later start may succeed."""

_LOST_MESSAGE = "failed to connect to monitor socket"
"""libvirt's message about an emulator that ended before libvirt connected to its monitor. libvirt
then omits the reason that the emulator printed."""


def is_down(error: libvirt.libvirtError) -> bool:
    """Return True if the connection to libvirtd failed."""
    code = error.get_error_code()
    if code in {libvirt.VIR_ERR_NO_CONNECT, libvirt.VIR_ERR_INVALID_CONN, libvirt.VIR_ERR_RPC}:
        return True
    # The error domain tells a lost connection from a missing disk, which is a system error too.
    return error.get_error_domain() in _RPC and code in {
        libvirt.VIR_ERR_SYSTEM_ERROR,
        libvirt.VIR_ERR_INTERNAL_ERROR,
    }


def cause(text: str) -> str:
    """Return the last line of libvirt's message, where QEMU names the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "libvirt gave no reason"
    return _STAMP.sub("", _PREFIXES.sub("", lines[-1])) or lines[-1]


def translated(
    error: libvirt.libvirtError, doing: str, *, connecting: bool = False
) -> VirtbusError:
    """Return `error` as a VirtbusError. `doing` names the attempted operation in the message.

    `connecting` says that the failed call was a connect. libvirt is then down.
    """
    text = cause(error.get_error_message() or str(error))
    if connecting or is_down(error):
        message = f"libvirt does not answer ({text}); start libvirtd, guests keep running meanwhile"
        return VirtbusError(Code.UNAVAILABLE, "libvirt_down", message, after_ms=1000)
    match = _WRAPPER.match(text)
    if match is not None:
        code = Code.UNAVAILABLE if _LATER.match(match[1]) else Code.INTERNAL
        return VirtbusError(code, match[1], f"{doing}: {match[2]}")
    if text.startswith(_LOST_MESSAGE):
        message = f"{doing}: the emulator ended at once and gave no reason ({text}); tried again"
        return VirtbusError(Code.UNAVAILABLE, "emulator_ended", message, after_ms=1000)
    if error.get_error_code() in _AGENT:
        return _of_the_agent(text)
    kind, reason = _TABLE.get(error.get_error_code(), (Code.INTERNAL, "libvirt_failed"))
    return VirtbusError(kind, reason, f"{doing}: {text}")


def _of_the_agent(text: str) -> VirtbusError:
    if "not connected" in text:
        message = (
            "no guest agent runs in the guest; install and start qemu-guest-agent in it, "
            "or wait until it has booted"
        )
        return VirtbusError(Code.CONFLICT, "guest_agent_absent", message)
    message = (
        f"the guest agent does not answer ({text}); "
        "repeat in a moment, or in the guest: systemctl restart qemu-guest-agent"
    )
    return VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", message, after_ms=5000)
