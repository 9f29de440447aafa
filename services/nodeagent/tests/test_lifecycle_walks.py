"""Random walks over the table of a VM's life: invariants that hold for events in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from virtbus.nodeagent.core.lifecycle import VISIBLE, Action, Event, Phase, step
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy

WAY_UP = {Action.PREPARE, Action.START, Action.AWAIT_START}
GUEST_ENDS = st.sampled_from([Event.SHUT_DOWN, Event.ENDED, Event.CRASHED])
ENOUGH = 20


class Life(RuleBasedStateMachine):
    """A VM and its guest; `doing` is the agent's unfinished work."""

    @initialize(strategy=st.sampled_from([str(one) for one in RunStrategy]))
    def begin(self, strategy: str) -> None:
        self.strategy = strategy
        self.phase = Phase.NEW
        self.guest = False
        self.doing: set[Action] = set()
        self.deleting = False

    def take(self, event: Event) -> None:
        self.phase, actions = step(self.phase, event, self.strategy)
        for action in actions:
            assert not (self.deleting and action in WAY_UP), "a deleted VM is on its way up"
            if action is Action.RELEASE:
                assert not self.guest, "disks are released under a guest"
                self.doing.clear()
            self.doing.add(action)

    # --- requests of users ----------------------------------------------------------------
    @precondition(lambda self: not self.deleting)
    @rule(event=st.sampled_from([Event.RUN, Event.HALT]))
    def wish(self, event: Event) -> None:
        self.take(event)

    @rule()
    def delete(self) -> None:
        self.deleting = True
        self.take(Event.DELETE)

    # --- results of actions ---------------------------------------------------------------
    @precondition(lambda self: Action.PREPARE in self.doing)
    @rule(event=st.sampled_from([Event.PARTS_READY, Event.PARTS_FAILED, Event.PARTS_IMPOSSIBLE]))
    def prepared(self, event: Event) -> None:
        self.doing.discard(Action.PREPARE)
        if self.phase is Phase.PREPARING:  # otherwise it was ended: its event is not posted
            self.take(event)

    @precondition(lambda self: Action.START in self.doing)
    @rule(event=st.sampled_from([Event.STARTED, Event.START_FAILED, Event.START_LATER]))
    def start_ended(self, event: Event) -> None:
        self.doing.discard(Action.START)
        self.guest = event is Event.STARTED
        self.take(event)

    @precondition(lambda self: Action.DESTROY in self.doing)
    @rule()
    def destroyed(self) -> None:
        self.doing -= {Action.DESTROY, Action.START}
        self.guest = False
        self.take(Event.ENDED)

    @precondition(lambda self: Action.RELEASE in self.doing)
    @rule()
    def released(self) -> None:
        self.doing.discard(Action.RELEASE)
        self.take(Event.RELEASED)

    # --- spontaneous events ---------------------------------------------------------------
    @precondition(lambda self: self.guest)
    @rule(event=GUEST_ENDS)
    def guest_ends(self, event: Event) -> None:
        self.guest = False
        self.take(event)

    @precondition(lambda self: self.doing & {Action.RETRY_SOON, Action.RETRY_BACKED_OFF})
    @rule()
    def retry(self) -> None:
        self.doing -= {Action.RETRY_SOON, Action.RETRY_BACKED_OFF}
        self.take(Event.RETRY)

    @precondition(lambda self: Action.SHUTDOWN in self.doing)
    @rule()
    def grace_over(self) -> None:
        self.doing.discard(Action.SHUTDOWN)
        self.take(Event.GRACE_OVER)

    # --- guarantees -----------------------------------------------------------------------
    @invariant()
    def a_guest_that_runs_is_known(self) -> None:
        if getattr(self, "guest", False):
            assert self.phase in {Phase.RUNNING, Phase.STOPPING, Phase.ENDING}

    @invariant()
    def a_deleted_vm_is_shown_so(self) -> None:
        if getattr(self, "deleting", False):
            assert VISIBLE[self.phase] is VmState.DELETING

    def teardown(self) -> None:
        """From every end of a walk, a delete completes."""
        if not hasattr(self, "phase"):
            return
        self.delete()
        for _ in range(ENOUGH):
            if self.phase is Phase.RELEASED:
                break
            if Action.DESTROY in self.doing:
                self.destroyed()
            elif Action.RELEASE in self.doing:
                self.released()
            elif Action.START in self.doing:
                self.start_ended(Event.STARTED)
            else:
                self.grace_over()
        self.take(Event.PURGED)
        assert str(self.phase) == Phase.GONE


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)
