"""The version of virtbus, and the check of the schema version of stored data (ADR 0040)."""

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.model import SCHEMA_VERSION

VERSION = "0.2.0"
"""A constant, because importlib.metadata takes 20 ms. A test checks that every package has this
version."""

_OLDER = "virtbus 0.1, which this version does not read; see docs/howto/upgrade-from-0.1.md"


def check_version(
    what: str, version: int | str, *, reasons: tuple[str, str], next_step: str = "upgrade it"
) -> None:
    """Raise if data has another schema version than this program writes.

    A version that is not a number counts as newer.

    Args:
        what: the data, as the subject of the error's sentence.
        version: the version that was found.
        reasons: the error's reason for older data, and the reason for newer data.
        next_step: the end of the error's sentence for newer data.

    Raises:
        VirtbusError: 422 with one of `reasons`.
    """
    text = str(version)[:20]
    if text == str(SCHEMA_VERSION):
        return
    older, newer = reasons
    if text.isdecimal() and int(text) < SCHEMA_VERSION:
        raise VirtbusError(Code.UNSUPPORTED, older, f"{what} is of {_OLDER}")
    message = f"{what} has schema version {text}, this program knows {SCHEMA_VERSION}"
    raise VirtbusError(Code.UNSUPPORTED, newer, f"{message}; {next_step}")
