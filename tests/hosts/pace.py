"""Measures the slowness of this machine under other load: 1 s of work takes `slowness` s."""

import functools
import time

SAMPLE_S = 0.25


@functools.cache
def slowness() -> float:
    """Return at least 1: the duration of SAMPLE_S of CPU at the first call, over SAMPLE_S."""
    began_s, cpu_s = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu_s < SAMPLE_S:
        pass
    return max((time.monotonic() - began_s) / SAMPLE_S, 1.0)
