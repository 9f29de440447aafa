"""The version of a host's state folder. A service refuses a folder that another version wrote."""

from pathlib import Path

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.model import OLDER, SCHEMA_VERSION

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
    if text.isdigit() and int(text) < SCHEMA_VERSION:
        raise VirtbusError(Code.UNSUPPORTED, "state_older", f"{state_dir} is of {OLDER}")
    if not text.isdigit() or int(text) > SCHEMA_VERSION:
        message = (
            f"{path} says version {text[:20]!r}, this program knows {SCHEMA_VERSION}; "
            "install the newer virtbus again, or move the state away"
        )
        raise VirtbusError(Code.UNSUPPORTED, "state_newer", message)
    return True
