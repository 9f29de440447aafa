"""The version of a host's state folder. A service refuses a folder that another version wrote."""

from pathlib import Path

from virtbus.schemas.version import check_version

FILE = "VERSION"


def check(state_dir: Path) -> bool:
    """Return False for a folder without a version, which is new; the agent writes it.

    Raises:
        VirtbusError: 422 `state_older` or `state_newer`. Nothing was touched, and guests run on.
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
