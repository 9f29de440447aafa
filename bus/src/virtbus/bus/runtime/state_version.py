"""Checks the version of a host's state folder, and refuses another version."""

from pathlib import Path

from virtbus.schemas.version import check_version

FILE = "VERSION"


def check(state_dir: Path) -> bool:
    """Return True if the folder has this program's version; False for a new folder.

    The agent writes the version into a new folder.

    Raises:
        VirtbusError: 422 `state_older` or `state_newer`. Nothing was changed, and guests still run.
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
