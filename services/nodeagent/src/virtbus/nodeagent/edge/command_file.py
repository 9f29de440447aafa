"""What became of a VM's last commands, in a file beside its record."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from virtbus.nodeagent.edge.durable import replace

log = logging.getLogger(__name__)

NAME = "commands"


def read_commands(folder: Path) -> dict[str, str]:
    """By id, in order; none where there is no file, or an unreadable one."""
    try:
        told = json.loads((folder / NAME).read_bytes())
        return {str(one): str(state) for one, state in told.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.error("unreadable commands: %s", error, extra={"code": "bad_command_file"})
        return {}


def write_commands(folder: Path, told: Mapping[str, str]) -> None:
    """Durable on return; nothing where the VM is not here any more."""
    if folder.is_dir():
        replace(folder / NAME, json.dumps(dict(told)).encode())
