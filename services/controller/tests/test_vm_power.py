"""start, stop, restart, pause and unpause over the API: their writes and their refusals."""

from collections.abc import Callable
from typing import Any

import pytest
from services.controller.tests.fleets import record, status, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.controller.core import mutations
from virtbus.controller.core.mutations import updated
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy, VmRecord
from virtbus.schemas.vm_status import GUEST_ENDED


def paused_by_spec(**more: Any) -> VmRecord:
    one = record(**more)
    return one.model_copy(update={"spec": one.spec.model_copy(update={"start_strategy": "Paused"})})


# --- effects of a change on a record ---------------------------------------------------------
def test_a_pause_is_not_a_start() -> None:
    after = mutations.paused(record(power_epoch=3), up=True, on=True)
    assert (after.paused, after.pause_epoch, after.power_epoch) == (True, 1, 3)
    again = mutations.paused(after, up=True, on=False)
    assert (again.paused, again.pause_epoch) == (False, 2)


def test_a_restart_is_a_start_that_ends_the_earlier_guest() -> None:
    after = mutations.restarted(record(power_epoch=3, paused=True), up=True, grace_s=5)
    assert (after.power_epoch, after.restart_epoch, after.stop_grace_s) == (4, 4, 5)
    assert (after.powered, after.paused) == (True, False)


def test_a_stop_ends_a_pause() -> None:
    assert not mutations.powered(record(paused=True), on=False).paused


def test_an_agent_that_misses_a_stop_sees_by_the_pause_epoch_that_the_pause_has_ended() -> None:
    before = record(paused=True, pause_epoch=1)
    after = mutations.started(mutations.powered(before, on=False), up=False, paused=None)
    assert (after.powered, after.paused, after.pause_epoch) == (True, False, 2)
    assert mutations.powered(after, on=False).pause_epoch == 2


@pytest.mark.parametrize(
    ("asked", "by_spec", "paused"),
    [
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_a_start_may_override_the_specs_start_strategy(
    asked: bool | None, by_spec: bool, paused: bool
) -> None:
    off = paused_by_spec(powered=False) if by_spec else record(powered=False)
    assert mutations.started(off, up=False, paused=asked).paused is paused


def test_a_start_of_a_running_vm_neither_pauses_nor_resumes_it() -> None:
    assert not mutations.started(paused_by_spec(), up=True, paused=None).paused
    assert mutations.started(record(paused=True), up=True, paused=None).paused
    with pytest.raises(VirtbusError, match="vm pause") as refusal:
        mutations.started(record(), up=True, paused=True)
    assert refusal.value.reason == "running"


def test_a_restart_pauses_the_guest_if_the_spec_says_so() -> None:
    assert mutations.restarted(paused_by_spec(), up=True, grace_s=None).paused


@pytest.mark.parametrize("powered", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda r: mutations.paused(r, up=False, on=True),
        lambda r: mutations.paused(r, up=False, on=False),
        lambda r: mutations.restarted(r, up=False, grace_s=None),
    ],
)
def test_a_vm_that_is_off_or_has_ended_is_neither_paused_nor_restarted(
    change: Callable[[VmRecord], VmRecord], powered: bool
) -> None:
    with pytest.raises(VirtbusError, match="vm start") as refusal:
        change(record(powered=powered))
    assert refusal.value.reason == "not_running"


@pytest.mark.parametrize(
    ("before", "after", "paused"),
    [
        ({"powered": False}, RunStrategy.ALWAYS, True),
        ({"powered": True, "paused": False}, RunStrategy.ONCE, False),
        ({"powered": True, "paused": True}, RunStrategy.HALTED, False),
    ],
)
def test_a_run_strategy_starts_a_vm_by_its_start_strategy(
    before: dict[str, Any], after: RunStrategy, paused: bool
) -> None:
    one = paused_by_spec(**before)
    strategy = RunStrategy.ALWAYS if one.powered else RunStrategy.HALTED
    one = one.model_copy(update={"spec": one.spec.model_copy(update={"run_strategy": strategy})})
    spec = one.spec.model_copy(update={"run_strategy": after})
    assert updated(one, spec=spec, labels=None, annotations=None).paused is paused


# --- over the bus ----------------------------------------------------------------------------
@played()
async def test_a_vm_is_paused_and_restarted_while_it_runs(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    view = await made.vm("pause", name="web")
    assert (view.paused, view.power_observed) == (True, False)
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.PAUSED, pause_epoch=1))
    await settle()
    view = await made.vm("get", name="web")
    assert (view.state, view.power_observed) == (VmState.PAUSED, True)
    view = await made.vm("restart", name="web", grace_s=0)
    assert (view.paused, view.power_observed) == (False, False)


@played()
async def test_a_create_that_starts_paused_reports_it(made: World) -> None:
    spec = {"start_strategy": "Paused"}
    one = await made.vm("create", name="web", image="tiny", uid=uid(1), spec=spec)
    assert one.paused
    manual = spec | {"run_strategy": "Manual"}
    two = await made.vm("create", name="db", image="tiny", uid=uid(2), spec=manual)
    assert not two.paused
    assert (await made.vm("start", uid=uid(2))).paused


@played()
async def test_an_ended_guest_is_refused_with_the_next_step(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    stored = await made.stored(uid(1))
    assert stored is not None
    await made.say(status(stored, VmState.FAILED, reason=GUEST_ENDED, failure_stage="guest"))
    await settle()
    for verb in ("pause", "unpause", "restart"):
        error = await refused(made.ask(verb, name="web"))
        assert (error.code, error.reason) == (409, "not_running")
    assert (await made.vm("start", name="web", paused=True)).paused


@played()
async def test_a_pause_that_comes_again_acts_once(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    for verb, once in (("pause", "a"), ("pause", "a"), ("unpause", "b"), ("pause", "a")):
        subject = subjects.api("vm", verb)
        await made.client.request(subject, {"uid": uid(1)}, timeout_s=10, request_id=once)
    stored = await made.stored(uid(1))
    assert stored is not None
    assert (stored.paused, stored.pause_epoch) == (False, 2)
