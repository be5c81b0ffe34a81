"""The simulator: the real core, the real client protocol and the real wire between them, in a simulated world (`make sim`)."""
