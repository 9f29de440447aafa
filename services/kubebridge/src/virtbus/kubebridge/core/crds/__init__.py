"""Builds the CustomResourceDefinitions."""
