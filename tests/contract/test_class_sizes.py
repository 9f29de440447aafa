"""Large classes have a reason, and only these have one."""

from tests.contract import class_sizes

SMALL = "class Small:\n    def method(self) -> None:\n        self.value = 1\n"
PORT = "class Port(Protocol):\n" + "".join(f"    def m{n}(self) -> None: ...\n" for n in range(30))


def test_each_large_class_has_a_reason_and_each_reason_a_large_class() -> None:
    assert {size.name for size in class_sizes.sizes() if size.over} == set(class_sizes.REASONS)


def test_methods_and_assigned_attributes_count_and_those_of_a_protocol_do_not() -> None:
    assert list(class_sizes.sizes_in("m", SMALL)) == [("m.Small", 1, 1)]
    assert not list(class_sizes.sizes_in("m", PORT))
    many = SMALL + "".join(f"        self.a{n} = 1\n" for n in range(12))
    (size,) = class_sizes.sizes_in("m", many)
    assert size.over
