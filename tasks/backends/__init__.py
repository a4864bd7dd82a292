"""The backends that come with GraphKiln, one file an adapter. `graphkiln.tasks.contracts` says what one must offer."""
