"""The three stages, the adapters of frontends and backends, and the child processes in which they run.

Imports `graphkiln.storage`; nothing here is imported by it.
"""
