"""What netd does: one module per kernel interface or outside program.

Must not enter: decisions that a table or a pure function could take (those are in `core`).
"""
