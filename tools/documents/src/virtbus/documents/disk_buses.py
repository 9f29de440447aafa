"""Generates docs/reference/disk-buses.md: the table of buses and verbs."""

from virtbus.documents.kubevirt_fields import table
from virtbus.schemas.disk import DISKS_MAX, DiskBus
from virtbus.schemas.disk_buses import ABILITIES, MAX_DISKS, Ability, Verb

ABOUT: dict[Verb, str] = {
    Verb.START: "a guest starts with the disk",
    Verb.BOOT: "a guest boots from the disk, in the order of `boot_order`",
    Verb.CDROM: "`device: cdrom`, also without a volume",
    Verb.READONLY: "`readonly: true`",
    Verb.SERIAL: "the guest sees the whole serial",
    Verb.DISCARD: "a guest's discard shrinks the disk's file",
    Verb.BLOCK_SIZE: "`block_size`",
    Verb.IO_THREAD: "`io_threads` and `dedicated_io_thread`",
    Verb.LIMITS: "`limits`, also changed while the guest runs",
    Verb.ERROR_POLICY: "`error_policy` and `read_error_policy` other than `report`",
    Verb.HOT_PLUG: "attach to a running guest",
    Verb.UNPLUG: "detach from a running guest",
    Verb.GROW: "a running guest sees the new size",
    Verb.MEDIA_CHANGE: "another medium in the drive of a running guest",
}


def page() -> str:
    """Return the whole page."""
    reasons = [
        (str(bus), str(verb), ability.why)
        for bus in DiskBus
        for verb, ability in ABILITIES[bus].items()
        if ability.why
    ]
    return "\n".join(
        [
            "# Disk buses",
            "",
            "This page lists what works on each bus. *Refused* is refused by admission, because"
            " the bus cannot do it. The reasons are below."
            " ../howto/disks.md describes the fields, and ADR 0044 the measurements. The disk of a"
            " shared volume (ADR 0086) starts on each bus, and its size never changes.",
            "",
            *table(
                ("Verb", *(str(bus) for bus in DiskBus), "Meaning"),
                [
                    ("disks of one VM", *(str(MAX_DISKS[bus]) for bus in DiskBus), _total()),
                    *((str(verb), *_verdicts(verb), ABOUT[verb]) for verb in Verb),
                ],
            ),
            "## Reasons",
            "",
            *table(("Bus", "Verb", "Reason"), reasons),
        ]
    )


def _total() -> str:
    return f"{DISKS_MAX} on all buses"


def _verdicts(verb: Verb) -> list[str]:
    return [_shown(ABILITIES[bus][verb]) for bus in DiskBus]


def _shown(ability: Ability) -> str:
    return f"{ability.verdict} *" if ability.why else str(ability.verdict)
