"""netd's effects: one module per kernel interface or external program.

Decisions that a table or a pure function can make belong in `core`.
"""
