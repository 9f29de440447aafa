"""Measures an older tree and this one in turns, and bounds how much slower this one is."""
