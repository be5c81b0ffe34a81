"""The figures that README promises, measured: `make bench`, or `python -m tests.bench.bench --only NAME`."""
