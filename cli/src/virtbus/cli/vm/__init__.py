"""`virtbus vm`: the verbs on virtual machines, one module each.

Belongs here: what a verb asks, waits for and prints. Must not enter: checks that the server makes.
"""
