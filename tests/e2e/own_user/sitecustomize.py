"""Gives imaged a user of its own, as its systemd unit does; other processes stay as they are.

A platform of `test_own_user` has this folder in PYTHONPATH, so each of its Pythons runs this first.
"""

import os
import sys
from pathlib import Path

USER_ID = 62_015
BECOME = f"""
if [ -n "$2" ]; then
    mount --bind "$1" /mnt
    mount -t tmpfs -o mode=755 tmpfs "$2"
    mkdir -p "$1"
    mount --move /mnt "$1"
fi
umask 077
shift 2
exec setpriv --reuid={USER_ID} --regid={USER_ID} --clear-groups "$@"
"""
"""Runs in a mount namespace of its own. $1 is the folder of the Python installation.

$2 is a folder above it that other users cannot enter, such as /root, or empty. A tmpfs that has
only the Python installation replaces $2 there.
"""


def _own(user_id: int) -> None:
    """Give imaged's folders and credentials to the user."""
    state, run = Path(os.environ["VIRTBUS_STATE_DIR"]), Path(os.environ["VIRTBUS_RUN_DIR"])
    backups = Path(os.environ["VIRTBUS_BACKUP_DIR"])
    for folder in (state / "images", state / "disks", run / "image-names", backups):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user_id, user_id, follow_symlinks=False)
    os.chown(os.environ["VIRTBUS_CREDS"], user_id, user_id)


def _closed(prefix: Path) -> str:
    """Return the highest folder above the interpreter that others cannot pass; or nothing."""
    above = reversed(prefix.parents)
    return next((str(path) for path in above if not path.stat().st_mode & 0o001), "")


if sys.orig_argv[1:3] == ["-m", "virtbus.imaged"] and os.geteuid() == 0:
    _own(USER_ID)
    prefix = Path(sys.base_prefix).resolve()
    words = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", BECOME, "become")
    os.execvp(words[0], [*words, str(prefix), _closed(prefix), *sys.orig_argv])
