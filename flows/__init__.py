"""Prefect flows, the trainer's entry and the command line. Imports `graphkiln.tasks` and `graphkiln.storage`."""
