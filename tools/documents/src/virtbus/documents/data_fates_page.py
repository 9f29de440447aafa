"""Generates docs/reference/data-fates.md from the table of fates."""

from virtbus.documents.data_fates import FATES
from virtbus.documents.fates import Data, Outcome
from virtbus.documents.kubevirt_fields import table


def page() -> str:
    """Return the whole page."""
    rows = [
        (event, *(_shown(outcomes.get(data)) for data in Data)) for event, outcomes in FATES.items()
    ]
    tests = [
        (event, str(data), f"`{outcome.shown_by}`")
        for event, outcomes in FATES.items()
        for data, outcome in outcomes.items()
    ]
    return "\n".join(
        [
            "# What happens to data",
            "",
            "This page lists the outcome of each event for each kind of data on a host. An empty"
            " cell means that the event does not touch such data. Images are no data of this kind:"
            " a node fetches them again (../howto/images.md).",
            "",
            "A volume with retention `Delete` was made by its VM's spec (../howto/volumes.md)."
            " An empty cell in its column means: as for a volume.",
            "",
            *table(("Event", *map(str, Data)), rows),
            "## Tests",
            "",
            *table(("Event", "Data", "Shown by"), tests),
        ]
    )


def _shown(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return f"{outcome.fate}; {outcome.note}" if outcome.note else str(outcome.fate)
