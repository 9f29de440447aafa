"""Stores the results of a VM's last commands in a file next to its record."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from virtbus.nodeagent.edge.atomic_file import replace

log = logging.getLogger(__name__)

NAME = "commands"


def read_commands(folder: Path) -> dict[str, str]:
    """Return the results by id, in order; empty without a readable file."""
    try:
        told = json.loads((folder / NAME).read_bytes())
        return {str(one): str(state) for one, state in told.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.error("unreadable commands: %s", error, extra={"code": "bad_command_file"})
        return {}


def write_commands(folder: Path, told: Mapping[str, str]) -> None:
    """Write durably; no effect if the VM is not on this host any more."""
    if folder.is_dir():
        replace(folder / NAME, json.dumps(dict(told)).encode())
