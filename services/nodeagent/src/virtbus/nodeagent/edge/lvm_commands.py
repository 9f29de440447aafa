"""Runs one command of LVM at a time, without a shell and with a time limit (ADR 0088)."""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

PROGRAM = "lvm"
TIMEOUT_S = 20.0
ENDS_S = 2.0
_WHY_CHARS = 300


class LvmCommands:
    """The commands for one volume group.

    A command that hangs in the kernel cannot be ended. While a command hangs, further commands are
    refused, because they would hang on the same device.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._left: Process | None = None

    async def run(self, words: Sequence[str]) -> str:
        """Return the output of a command.

        Raises:
            OSError: the command fails (the text is LVM's reason), or an earlier command hangs.
            TimeoutError: the command takes longer than the time limit.
        """
        if self._left is not None and self._left.returncode is None:
            raise OSError(0, f"an earlier command of LVM hangs (process {self._left.pid})")
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, *words), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=_environment()
        )
        self._left = process
        try:
            async with asyncio.timeout(self._timeout_s):
                said, why = await process.communicate()
        except TimeoutError:
            msg = f"{words[0]} does not answer in {self._timeout_s:g} s"
            raise TimeoutError(msg) from None
        finally:
            await _end(process)
        if process.returncode:
            raise OSError(0, f"{words[0]}: {_reason(why) or f'status {process.returncode}'}")
        return said.decode(errors="replace")


def _environment() -> dict[str, str]:
    """Return the environment of the commands, without LVM's warnings about inherited descriptors.

    The commands inherit no descriptors of the agent.
    """
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "LC_ALL": "C", "LVM_SUPPRESS_FD_WARNINGS": "1"}


async def _end(process: Process) -> None:
    """End a process if it runs. LVM delays SIGTERM while it changes the kernel's tables."""
    for end in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            end()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_S):
                await process.wait()


def _reason(said: bytes) -> str:
    lines = (line.strip() for line in said.decode(errors="replace").splitlines())
    return "; ".join(one for one in lines if one and not one.startswith("WARNING:"))[:_WHY_CHARS]
