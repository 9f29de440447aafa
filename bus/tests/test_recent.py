"""A dictionary of recent entries has a bound, and forgets the oldest."""

from virtbus.bus.runtime.recent import Recent


def test_the_oldest_entry_is_forgotten_and_a_repeat_is_new() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert list(recent.items()) == [("a", 3), ("c", 4)]
