"""Findings say what the host has after a repair."""

from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.finding import repaired

NETWORK = Attachment(uid="0192f0c1-2d3e-7abc-8def-00000000000a", epoch=1, generation=1, nics=())
RULES = "the rules of its security groups are gone"


def test_a_repair_that_leaves_a_part_missing_does_not_say_that_it_was_made() -> None:
    finding = repaired(NETWORK, ["eth0 has no bridge", RULES], [RULES])
    assert (finding.reason, finding.error) == ("network_incomplete", None)
    assert f"cannot make them: {RULES};" in finding.message
    assert "made again" not in finding.message


def test_a_complete_repair_names_what_was_missing() -> None:
    finding = repaired(NETWORK, [RULES], [])
    assert finding.reason == "network_mended"
    assert finding.message.endswith(f"{RULES}; they were made again")
