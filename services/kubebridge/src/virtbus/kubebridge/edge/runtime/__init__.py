"""Runs controllers: stores, reflectors, the work queue and the executor of actions."""
