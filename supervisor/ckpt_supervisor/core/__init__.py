"""What the supervisor decides, as pure functions of plain data: no clock, no I/O, no randomness, no logging."""
