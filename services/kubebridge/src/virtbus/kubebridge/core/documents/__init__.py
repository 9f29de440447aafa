"""Writes reference pages from the tables."""
