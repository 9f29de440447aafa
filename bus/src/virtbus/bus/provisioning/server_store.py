"""Prepares a server's store before the server starts."""

from pathlib import Path

from virtbus.bus.provisioning.permissions import CONTROL_ACCOUNT

_GLOBAL = "$G"


def ensure_account(store: Path) -> None:
    """Move the streams of a server without accounts to the account that owns them now.

    nats-server stores streams below their account's name. Early versions used the global account.
    The move is one rename within a directory, so it is atomic.
    """
    old, new = store / "jetstream" / _GLOBAL, store / "jetstream" / CONTROL_ACCOUNT
    if old.is_dir() and not new.exists():
        old.rename(new)
