"""What holds for all tests: the width that they ask for, signals that are not ignored, and no example that fails for being slow.

pytest-xdist gives its workers a COLUMNS of 80, which commands that draw would take for their user's wish. By itself hypothesis
fails an example that takes more than 0.2 s, and a test whose first examples take more than a second to make: what a busy machine
does to any of them at any time. A shell starts what it puts in the background with SIGINT ignored, and nohup with SIGHUP, and all
programs of the tests would inherit it.
"""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.pop("COLUMNS", None)
settings.register_profile("busy machine", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Two Python ignores itself, and not for its children.
for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)  # This process goes on ignoring it; in what it starts a handler is the default.
signal.pthread_sigmask(signal.SIG_SETMASK, ())
