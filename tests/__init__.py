"""The tests, as a package: the simulator is run as `python -m tests.sim`."""
