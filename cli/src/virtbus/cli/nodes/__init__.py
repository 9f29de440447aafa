"""`virtbus node VERB`: the verbs that say what is wanted of a host.

Belongs here: what a verb asks, waits for and prints. Must not enter: checks that the server makes.
"""
