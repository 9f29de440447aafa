"""Retention removes old backups, and none on which another or a person depends."""

import random

from services.controller.tests.fleets import uid

from virtbus.controller.core.retention import unneeded
from virtbus.schemas.backup import BackupCheck, BackupManifest, HeldBackup


def backup(
    number: int, parent: int = 0, schedule: str = "nightly", check: str | None = None
) -> HeldBackup:
    made = BackupManifest(
        id=uid(number),
        namespace="default",
        name="web",
        uid=uid(1),
        node="n1",
        schedule=schedule,
        created_ns=number,
        parent=uid(parent) if parent else "",
        depth=1 if parent else 0,
    )
    found = None
    if check is not None:
        found = BackupCheck(operation=uid(2), at_ns=1, problem=check)
    return HeldBackup(id=made.id, manifest=made, check=found)


def gone(held: list[HeldBackup], keep: int) -> list[str]:
    return unneeded(held, "nightly", "default", keep)


def test_the_newest_are_kept() -> None:
    held = [backup(number) for number in (11, 12, 13)]
    assert gone(held, 2) == [uid(11)]
    assert gone(held, 5) == []


def test_the_newest_are_those_with_the_greatest_numbers() -> None:
    """The clock of the node was set back: the last backup has the earliest time."""
    made = [backup(number, check="") for number in (13, 12, 11)]
    held = [
        one.model_copy(update={"manifest": one.manifest.model_copy(update={"number": number})})
        for number, one in enumerate(made, 1)
        if one.manifest is not None
    ]
    assert gone(held, 1) == [uid(13), uid(12)]
    assert gone([backup(99), *held], 2) == [uid(99), uid(13)], "earlier versions gave no number"


def test_a_parent_stays_and_a_chain_is_removed_from_its_end() -> None:
    held = [backup(11), backup(12, 11), backup(13, 11), backup(14)]
    assert gone(held, 2) == [uid(12)]
    assert gone([*held, backup(15)], 2) == [uid(13), uid(12), uid(11)]


def test_the_last_verified_one_stays_and_so_does_a_damaged_one() -> None:
    held = [backup(11, check=""), backup(12, check="bad"), backup(13), backup(14)]
    assert gone(held, 1) == [uid(13)]


def test_others_are_not_touched() -> None:
    held = [backup(11), backup(12, 11, schedule=""), backup(13), backup(14)]
    unreadable = HeldBackup(id=uid(15))
    assert gone([*held, unreadable], 1) == [uid(13)]


def test_all_of_a_chain_stays_while_one_of_it_cannot_be_read() -> None:
    chain = [backup(11), *(backup(number, number - 1) for number in range(12, 19))]
    assert gone([*chain, backup(19), backup(20)], 2) == [uid(n) for n in range(18, 10, -1)]
    chain[4] = HeldBackup(id=uid(15))
    assert gone(chain, 3) == []


def test_the_parent_of_an_increment_that_cannot_be_read_stays() -> None:
    parent = backup(12, 11).model_copy(update={"children": (uid(13),)})
    held = [backup(11), parent, HeldBackup(id=uid(13)), backup(14), backup(15)]
    assert gone(held, 1) == [uid(14)]


def test_what_stays_is_always_complete() -> None:
    chosen = random.Random(7)
    for _ in range(300):
        held: list[HeldBackup] = []
        for number in range(11, 11 + chosen.randint(1, 12)):
            parent = chosen.choice([0, *range(11, number)])
            schedule = chosen.choice(["nightly", "nightly", ""])
            held.append(backup(number, parent, schedule, chosen.choice([None, "", "bad"])))
        known = {one.id: one.manifest for one in held if one.manifest is not None}
        removed = gone(held, chosen.randint(1, 5))
        left = dict(known)
        for id_ in removed:
            assert known[id_].schedule == "nightly"
            assert not [one for one in left.values() if one.parent == id_]
            del left[id_]
        good = [one for one in held if one.check is not None and not one.check.problem]
        mine = [one.id for one in good if known[one.id].schedule == "nightly"]
        assert not mine or max(mine) in left
