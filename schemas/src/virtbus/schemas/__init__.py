"""The messages of the bus: frozen pydantic models, subjects, errors.

Belongs here: anything two processes must agree on. Must not enter: I/O, clocks, randomness, tasks,
or a decision that only one service makes.
"""
