"""Findings say what the host has after a repair."""

from unittest.mock import AsyncMock, MagicMock

from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.finding import repaired
from virtbus.netd.network_check import examined
from virtbus.netd.network_entry import NetworkEntry
from virtbus.schemas.node_rpc import NetPhase

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


async def test_a_network_that_is_gone_is_not_said_to_be_made_again_while_no_guest_runs() -> None:
    builder = MagicMock(found=AsyncMock(return_value=False))
    builder.stands.return_value = False
    entry = NetworkEntry(NETWORK, NetPhase.READY)
    finding = await examined(builder, entry, runs=False)
    assert finding is not None
    assert finding.reason == "network_incomplete"
    assert finding.message.endswith("is gone; the VM's next start makes the network again")
    assert entry.phase is None
