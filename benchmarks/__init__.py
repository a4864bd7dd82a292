"""Side-by-side measurements: GraphKiln beside what one would do without it. Run with `python -m benchmarks`."""
