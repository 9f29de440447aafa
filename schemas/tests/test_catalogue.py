"""The catalogue has every subject."""

from virtbus.schemas import subjects
from virtbus.schemas.catalogue import CHANNELS, FILTERS


def test_every_subject_is_in_the_catalogue() -> None:
    made = {
        name
        for name, value in vars(subjects).items()
        if callable(value) and value.__module__ == subjects.__name__ and not name.startswith("_")
    }
    filters = {"vm_anywhere", "vm_all", "ready_all", "service_report_all", "events"}
    filters |= {"signing_keys", "watch_renewals", "operation_anywhere", "names_asks"}
    readers = {"claimed_address"}
    assert made - filters - readers == {channel.function for channel in CHANNELS}
    assert len(FILTERS) == len(filters)
