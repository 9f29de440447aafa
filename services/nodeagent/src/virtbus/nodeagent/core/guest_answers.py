"""Converts a guest agent's answers from libvirt's flat map (`virDomainGetGuestInfo`).

The map's keys are `user.count`, `user.0.name` and so on. Its values come from the guest: they may
be missing, of any type, and too long.
"""

from collections.abc import Iterator, Mapping

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.disks import targets
from virtbus.nodeagent.core.guest_files import udev_serial
from virtbus.schemas.guest import GuestFilesystem, GuestInfo, GuestInterface, GuestOs, GuestUser
from virtbus.schemas.vm import VmRecord

MOST_ITEMS = 64
MOST_PARTS = 16
"""The limit of disks per file system, and of addresses per interface."""
MOST_BYTES = 256
"""The limit of a text. The three limits keep an answer below a message's 1 MiB."""

Answers = Mapping[str, object]


def guest_info(answers: Answers) -> GuestInfo:
    """Return the answers as a model. Missing or malformed values are empty."""
    return GuestInfo(
        hostname=_text(answers, "hostname"),
        os=_os(answers),
        users=tuple(_user(answers, at) for at in _items(answers, "user")),
        filesystems=tuple(_filesystem(answers, at) for at in _items(answers, "fs")),
        interfaces=tuple(_interface(answers, at) for at in _items(answers, "if")),
    )


def named_disks(
    info: GuestInfo, answers: Answers, record: VmRecord, addresses: Addresses
) -> GuestInfo:
    """Add the disks' names in the spec to the answers.

    `addresses` has the addresses of the running guest. libvirt finds a disk by the controller and
    address in the guest agent's report. The guest agent does not know USB controllers, so USB disks
    are found by serial.
    """
    domain = record.spec.domain
    by_target = {target: name for name, target in targets(domain, addresses).items()}
    by_serial = {udev_serial(disk): disk.name for disk in domain.devices.disks}
    found = []
    for at, one in zip(_items(answers, "fs"), info.filesystems, strict=True):
        disks = _items(answers, f"{at}.disk", MOST_PARTS)
        shown = (
            by_target.get(_text(answers, f"{disk}.alias"))
            or by_serial.get(_text(answers, f"{disk}.serial"))
            for disk in disks
        )
        found.append(one.model_copy(update={"spec_disks": tuple(name for name in shown if name)}))
    return info.model_copy(update={"filesystems": tuple(found)})


def _os(answers: Answers) -> GuestOs | None:
    if not any(key.startswith(("os.", "timezone.")) for key in answers):
        return None
    return GuestOs(
        id=_text(answers, "os.id"),
        name=_text(answers, "os.name"),
        pretty_name=_text(answers, "os.pretty-name"),
        version=_text(answers, "os.version"),
        version_id=_text(answers, "os.version-id"),
        variant=_text(answers, "os.variant"),
        variant_id=_text(answers, "os.variant-id"),
        kernel_release=_text(answers, "os.kernel-release"),
        kernel_version=_text(answers, "os.kernel-version"),
        machine=_text(answers, "os.machine"),
        timezone=_text(answers, "timezone.name"),
        utc_offset_s=_number(answers, "timezone.offset") or 0,
    )


def _user(answers: Answers, at: str) -> GuestUser:
    login_ms = _number(answers, f"{at}.login-time") or 0
    return GuestUser(
        name=_text(answers, f"{at}.name"),
        domain=_text(answers, f"{at}.domain"),
        login_time_s=login_ms / 1000,
    )


def _filesystem(answers: Answers, at: str) -> GuestFilesystem:
    disks = (_text(answers, f"{disk}.alias") for disk in _items(answers, f"{at}.disk", MOST_PARTS))
    return GuestFilesystem(
        name=_text(answers, f"{at}.name"),
        mountpoint=_text(answers, f"{at}.mountpoint"),
        type=_text(answers, f"{at}.fstype"),
        total_bytes=_number(answers, f"{at}.total-bytes"),
        used_bytes=_number(answers, f"{at}.used-bytes"),
        disks=tuple(disk for disk in disks if disk),
    )


def _interface(answers: Answers, at: str) -> GuestInterface:
    return GuestInterface(
        name=_text(answers, f"{at}.name"),
        mac=_text(answers, f"{at}.hwaddr"),
        addresses=tuple(
            f"{_text(answers, f'{address}.addr')}/{_number(answers, f'{address}.prefix') or 0}"
            for address in _items(answers, f"{at}.addr", MOST_PARTS)
        ),
    )


def _items(answers: Answers, name: str, most: int = MOST_ITEMS) -> Iterator[str]:
    count = _number(answers, f"{name}.count") or 0
    return (f"{name}.{number}" for number in range(min(count, most)))


def _text(answers: Answers, key: str) -> str:
    value = answers.get(key, "")
    if not isinstance(value, str):
        return ""
    return value.encode(errors="replace")[:MOST_BYTES].decode(errors="ignore")


def _number(answers: Answers, key: str) -> int | None:
    value = answers.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
