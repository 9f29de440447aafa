"""Reads the pools of a node, `/etc/virtbus/pools.toml`, for imaged and the nodeagent (ADR 0060)."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import Id
from virtbus.schemas.model import StrictModel
from virtbus.schemas.pool import LOCAL, POOLS_MAX, PoolKind
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.wire import validate

PROBE_S = 4.0
"""Interval of the probes of each pool."""
OVERCOMMIT = 10.0
"""Disks of guests are mostly empty. A full pool pauses its guests, so there is a limit."""


class LocalPool(StrictModel):
    """A directory: `<state_dir>/disks/pools/<name>`, or `disks/volumes` for the pool `local`."""

    kind: Literal[PoolKind.LOCAL] = PoolKind.LOCAL
    mount: bool = True
    """The directory must be a mount point. Otherwise a missing disk would look like an empty one.
    The pool `local` is always there."""
    overcommit: float = Field(OVERCOMMIT, ge=0)
    """The sum of the sizes that guests see, as a multiple of the pool's size; 0: no limit."""
    reserve: Bytes | None = Field(None, ge=0)
    """Bytes that new data leaves free; default: min_free_bytes and min_free_ratio of imaged."""


PoolSettings = LocalPool


class _File(StrictModel):
    pools: dict[Id, PoolSettings] = Field(default_factory=dict, max_length=POOLS_MAX)


def load_pools(path: Path) -> Mapping[str, PoolSettings]:
    """Return the pools of a file, and `local`; without the file, only `local`.

    Raises:
        VirtbusError: 400 with the path of each invalid setting.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {LOCAL: LocalPool()}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    try:
        plain = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, str(error)) from error
    pools = validate(_File, plain).pools
    if pools.get(LOCAL, LocalPool()).kind is not PoolKind.LOCAL:
        raise _unreadable(path, "the pool `local` is of the kind local; give the other a name")
    return {LOCAL: LocalPool(), **pools}


def check_pools(path: Path) -> None:
    """Raise ValueError if the file has invalid pools."""
    try:
        load_pools(path)
    except VirtbusError as error:
        problems = "; ".join(f"{one.path}: {one.message}" for one in error.body.details)
        raise ValueError(f"{path}: {problems}" if problems else str(error)) from error


def _unreadable(path: Path, why: str) -> VirtbusError:
    message = f"{path}: {why}; `virtbus config check` shows the settings"
    return VirtbusError(Code.INVALID, "pool_settings", message)
