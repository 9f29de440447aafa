"""Generators of the files that follow from the code: reference pages, wire documents, manifests.

Belongs here: the text of generated files, from the tables of any member. Must not enter: a table
itself. Nothing imports this package except tests, and no host or image has it.
"""
