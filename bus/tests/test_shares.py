"""Nobody holds all of what several share."""

import random

from virtbus.bus.shares import Shares, Turns


def _greedy(shares: Shares, caller: str) -> int:
    held = 0
    while shares.take(caller):
        held += 1
    return held


def test_one_caller_alone_gets_three_quarters_and_the_next_ones_get_a_share_of_the_rest() -> None:
    shares = Shares(1000)
    assert _greedy(shares, "observer") == 750
    assert _greedy(shares, "bridge") >= 180
    assert _greedy(shares, "client") >= 40
    assert shares.take("one more")


def test_our_own_are_bounded_by_the_total_only() -> None:
    shares = Shares(10)
    assert _greedy(shares, "") == 10
    assert not shares.take("other")


def test_limits_of_one_to_three_can_be_used_whole() -> None:
    assert [_greedy(Shares(total), "a") for total in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 3]


def test_what_is_given_back_is_free_again_and_nobody_is_remembered() -> None:
    rng = random.Random(1)
    shares, held = Shares(10_000), list[tuple[str, int]]()
    for _ in range(5000):
        caller, amount = rng.choice("abc"), rng.randrange(0, 200)
        if shares.take(caller, amount):
            held.append((caller, amount))
        assert shares.held == sum(amount for _, amount in held) <= 10_000
        if held and rng.random() < 0.5:
            shares.release(*held.pop(rng.randrange(len(held))))
    for one in held:
        shares.release(*one)
    assert (shares.held, shares._held) == (0, {})


def test_callers_take_turns_and_each_keeps_its_own_order() -> None:
    turns: Turns[int] = Turns()
    for number in range(100):
        turns.add("many", number)
    turns.add("few", 1000)
    taken = []
    while callers := list(turns.callers()):
        taken.append(turns.take(callers[0]))
    assert taken[:3] == [0, 1000, 1]
    assert [one for one in taken if one != 1000] == list(range(100))
