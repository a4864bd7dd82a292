"""Digests, keys, documents, blobs, actions, manifests and refs on any fsspec location.

Pure logic apart from I/O. Imports nothing of `graphkiln.tasks` or `graphkiln.flows`, no Prefect, no compiler.
"""
