"""The tables of a uid: which words end a VM, and which are remembered."""

from typing import get_args

import pytest

from virtbus.nodeagent.core.uid_table import (
    ABSENT,
    AFTER_LIST,
    FROM_ANY,
    LISTINGS,
    PURGED,
    REACTIONS,
    Holding,
    Listing,
    Reaction,
    Word,
)

LISTS: tuple[Listing, ...] = get_args(Listing)


def after(state: Listing, word: Word) -> Listing:
    return LISTINGS.get((state, word), FROM_ANY.get(word, state))


@pytest.mark.parametrize("state", LISTS)
def test_each_uid_has_a_reaction_after_a_complete_list(state: Listing) -> None:
    assert after(after(state, "begin"), "complete") in AFTER_LIST


@pytest.mark.parametrize("state", LISTS)
def test_only_a_purge_ends_a_vm(state: Listing) -> None:
    """Absence is no command (ADR 0033)."""
    for word in get_args(Word):
        found = after(state, word)
        if AFTER_LIST.get(found) == "end" or found in PURGED:
            assert word in {"deleted", "moved"} or state in PURGED


@pytest.mark.parametrize("state", LISTS)
def test_a_purge_is_remembered_until_the_next_list_or_record(state: Listing) -> None:
    forgets = {"record", "unreadable", "begin", "restored"}
    for word in set(get_args(Word)) - forgets:
        if state in PURGED and word not in {"deleted", "moved"}:
            assert PURGED[after(state, word)] == PURGED[state]


def test_a_vm_that_the_bus_lacks_stays_absent_while_the_bus_is_listed_again() -> None:
    for state in ABSENT:
        assert after(state, "begin") == "absent"
    assert after("absent", "complete") == "absent"


@pytest.mark.parametrize("has", get_args(Holding))
def test_each_record_and_each_purge_has_a_reaction(has: Holding) -> None:
    words: set[Word] = {"record", "deleted", "moved"}
    words |= {"successor"} if "actor" in has else {"left"}
    assert all(REACTIONS[has, word] for word in words)


def test_a_purge_starts_nothing_and_a_record_ends_nothing() -> None:
    starts: set[Reaction] = {"adopt", "update", "queue", "replace next"}
    for (has, word), reactions in REACTIONS.items():
        if word in PURGES:
            assert not starts & set(reactions), has
        else:
            assert "end" not in reactions, has


PURGES: set[Word] = {"deleted", "moved"}


def test_every_state_is_reached_and_every_reaction_is_used() -> None:
    reached = {after(state, word) for state in LISTS for word in get_args(Word)}
    assert reached == set(LISTS)
    used = {one for row in REACTIONS.values() for one in row} | set(AFTER_LIST.values())
    assert used == set(get_args(Reaction))
