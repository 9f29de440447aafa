"""The table of data's fates: every outcome names a test that exists."""

import re
from pathlib import Path

from virtbus.documents.data_fates import FATES
from virtbus.documents.fates import Data, Fate, Outcome

ROOT = Path(__file__).parents[2]
STAYS = Outcome(Fate.STAYS, "")
EVENTS = (
    "`vm delete`",
    "a namespace of Kubernetes is deleted",
    "`vm stop`",
    "`node drain`, `vm move`",
    "`node fence`",
    "the host returns after a fence",
    "`node forget`",
    "a restored or rebuilt bus",
    "an operation fails or is cancelled",
    "its pool is full",
    "its pool is gone",
    "`deploy/uninstall --purge`",
)
KINDS = (
    *(Data.DISK, Data.VOLUME, Data.OWN_VOLUME),
    *(Data.SNAPSHOT, Data.EXPORT, Data.BACKUP),
)


def test_every_outcome_names_a_test_that_exists() -> None:
    for event, outcomes in FATES.items():
        for outcome in outcomes.values():
            path, _, name = outcome.shown_by.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            found = re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)
            assert found, f"{event}: {outcome.shown_by}"


def test_only_commands_that_name_it_remove_a_volume() -> None:
    ends = {Fate.REMOVED, Fate.LOST}
    found = {
        event
        for event, one in FATES.items()
        if Data.VOLUME in one and one[Data.VOLUME].fate in ends
    }
    assert found == {"`volume delete`", "`node forget`"}
    shared = {one for one, outcomes in FATES.items() if Data.SHARED_VOLUME in outcomes}
    ends_shared = {one for one in shared if FATES[one][Data.SHARED_VOLUME].fate in ends}
    assert ends_shared == found
    own = {event for event, one in FATES.items() if one.get(Data.OWN_VOLUME, STAYS).fate in ends}
    end_of_vm = {"`vm delete`", "a namespace of Kubernetes is deleted"}
    assert own == end_of_vm | {"`node forget`"}


def test_each_event_that_issue_15_names_has_an_outcome_for_each_kind_of_data() -> None:
    missing = [
        (event, data) for event in EVENTS for data in KINDS if data not in FATES.get(event, {})
    ]
    assert missing == []
