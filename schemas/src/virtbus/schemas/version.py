"""The version of virtbus. All members have it."""

VERSION = "0.2.0"
"""A constant, because importlib.metadata takes 20 ms. A test compares it with the members' own."""
