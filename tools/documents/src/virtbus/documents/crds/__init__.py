"""Builds the CustomResourceDefinitions from models of the objects."""
