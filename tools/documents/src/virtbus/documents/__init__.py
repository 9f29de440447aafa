"""Generators of the files that follow from the code: reference pages, wire documents, manifests.

Belongs here: the text of generated files, from the tables of any package. Must not enter: a table
itself. Only tests import this package, and no host or image contains it.
"""
