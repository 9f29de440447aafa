"""Lists the outcome of each event for shared volumes (ADR 0086), for `data_fates.py`."""

from virtbus.documents.fates import Fate, Outcome

_TESTS = "services/controller/tests/test_shared_volumes.py"
_POOLS = "services/imaged/tests/test_pools.py"
_AS_EACH = "as each volume"

SHARED_FATES = {
    "`vm delete`": Outcome(
        Fate.STAYS,
        f"{_TESTS}::test_two_vms_hold_one_shared_volume_and_the_end_of_one_keeps_the_other",
        "its other VMs keep it",
    ),
    "`volume delete`": Outcome(
        Fate.REMOVED,
        "services/imaged/tests/test_shared_volumes.py"
        "::test_it_is_removed_once_no_vm_has_it_and_is_not_made_again",
        "refused while any VM holds it or it is protected",
    ),
    "`volume move`": Outcome(Fate.REFUSED, f"{_TESTS}::test_what_needs_one_writer_is_refused"),
    "`vm stop`": Outcome(
        Fate.STAYS,
        f"{_TESTS}::test_a_detach_names_its_vm_while_several_hold_the_volume",
        "the VM still holds it",
    ),
    "`node drain`, `vm move`": Outcome(
        Fate.STAYS,
        f"{_TESTS}::test_the_second_vm_follows_the_data_of_a_local_pool",
        "with its VMs",
    ),
    "`node fence`": Outcome(
        Fate.STAYS,
        "services/controller/tests/test_volume_holders.py"
        "::test_a_vm_with_a_volume_waits_for_its_fenced_node",
        _AS_EACH,
    ),
    "`node forget`": Outcome(
        Fate.LOST,
        f"{_TESTS}::test_a_forgotten_node_loses_the_data_of_its_pool_and_none_of_a_server",
        "refused until `--lose-volume` names it; on a server it stays",
    ),
    "a restored or rebuilt bus": Outcome(
        Fate.STAYS, f"{_TESTS}::test_a_rebuild_restores_each_holder_of_a_shared_volume"
    ),
    "the volume's record is missing": Outcome(
        Fate.STAYS,
        f"{_TESTS}::test_an_adopted_shared_volume_has_all_of_its_vms",
        "`volume adopt` makes a record",
    ),
    "`snapshot create`": Outcome(Fate.REFUSED, f"{_TESTS}::test_what_needs_one_writer_is_refused"),
    "its pool is full": Outcome(
        Fate.STAYS,
        f"{_POOLS}::test_a_full_pool_takes_nothing_new_and_deletes_work_without_a_free_byte",
        _AS_EACH,
    ),
    "its pool is gone": Outcome(
        Fate.STAYS,
        f"{_POOLS}::test_a_pool_that_the_node_lacks_or_that_is_not_there_is_refused",
        _AS_EACH,
    ),
}
