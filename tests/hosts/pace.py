"""How slow this machine is for what other work goes on: what 1 s is alone takes `slowness` s."""

import functools
import time

SAMPLE_S = 0.25


@functools.cache
def slowness() -> float:
    """At least 1: the time that SAMPLE_S of a CPU takes at the first call, over SAMPLE_S."""
    began_s, cpu_s = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu_s < SAMPLE_S:
        pass
    return max((time.monotonic() - began_s) / SAMPLE_S, 1.0)
