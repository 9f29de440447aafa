"""Checks the version of a host's state folder; refuses a folder that another version wrote."""

from pathlib import Path

from virtbus.schemas.version import check_version

FILE = "VERSION"


def check(state_dir: Path) -> bool:
    """Return True if the folder has our version; False if it has none, because it is new.

    The agent writes the version into a new folder.

    Raises:
        VirtbusError: 422 `state_older` or `state_newer`. Nothing was changed; guests keep running.
    """
    path = state_dir / FILE
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not text:
        return False
    check_version(
        str(state_dir),
        text,
        reasons=("state_older", "state_newer"),
        next_step="install the newer virtbus again, or move the state away",
    )
    return True
