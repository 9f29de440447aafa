"""The operations on one VM: functions of values and ports, which return what came of them."""
