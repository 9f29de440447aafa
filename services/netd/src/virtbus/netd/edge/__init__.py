"""netd's effects: one module per kernel interface or external program.

Must not enter: decisions that a table or a pure function could make (those are in `core`).
"""
