"""Child processes in which frontends and compilers run, with limits on time, memory and log."""
