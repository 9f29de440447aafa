"""Defines controllers and their actions, without I/O."""
