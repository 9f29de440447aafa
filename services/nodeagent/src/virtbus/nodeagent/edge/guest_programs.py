"""Starts programs in a guest by its guest agent, and reads their results.

libvirt has no call for `guest-exec`, so this module uses `qemuAgentCommand`. libvirt then marks the
domain as tainted ("custom-ga-command"), visible only in a log and `virsh dominfo` (ADR 0071).
"""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import libvirt
import libvirt_qemu

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import EXEC_OUTPUT_BYTES, GuestExecuted

SIGNALLED = 128


class MalformedError(VirtbusError):
    """503 `guest_agent_silent`: the guest agent's answer is malformed."""

    def __init__(self, command: str) -> None:
        message = f"the guest agent's answer to {command} is malformed"
        super().__init__(Code.UNAVAILABLE, "guest_agent_silent", message)


def begin(words: Sequence[str], *, capture: bool) -> Callable[[libvirt.virDomain], int]:
    """Return a call that starts a program and returns its process id in the guest."""
    arguments = {"path": words[0], "arg": list(words[1:]), "capture-output": capture}

    def run(domain: libvirt.virDomain) -> int:
        answer = _ask(domain, "guest-exec", arguments)
        pid = answer.get("pid")
        if not isinstance(pid, int):
            raise MalformedError("guest-exec")
        return pid

    return run


def end(pid: int) -> Callable[[libvirt.virDomain], GuestExecuted | None]:
    """Return a call that returns the result of a program, or None while the program runs."""

    def run(domain: libvirt.virDomain) -> GuestExecuted | None:
        answer = _ask(domain, "guest-exec-status", {"pid": pid})
        if answer.get("exited") is not True:
            return None
        signal, exit_code = answer.get("signal"), answer.get("exitcode", 0)
        code = SIGNALLED + signal if isinstance(signal, int) else exit_code
        if not isinstance(code, int):
            raise MalformedError("guest-exec-status")
        return GuestExecuted(
            exit_code=code & 0xFF or min(abs(code), 1),  # Windows may fail with 0xC0000000
            stdout=_output(answer.get("out-data")),
            stderr=_output(answer.get("err-data")),
        )

    return run


def _ask(domain: libvirt.virDomain, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps({"execute": command, "arguments": arguments})
    default_timeout = libvirt_qemu.VIR_DOMAIN_QEMU_AGENT_COMMAND_DEFAULT
    answer = json.loads(libvirt_qemu.qemuAgentCommand(domain, text, default_timeout, 0))
    value = answer.get("return") if isinstance(answer, dict) else None
    if not isinstance(value, dict):
        raise MalformedError(command)
    return value


def _output(text: object) -> bytes:
    """The guest may send anything."""
    most_characters = EXEC_OUTPUT_BYTES // 3 * 4 + 4
    if not isinstance(text, str):
        return b""
    try:
        return base64.b64decode(text[:most_characters])[:EXEC_OUTPUT_BYTES]
    except ValueError:  # also binascii.Error
        return b""
