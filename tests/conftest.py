"""What holds for all tests: they see the width that they ask for, and no generated example fails for being slow.

pytest-xdist gives its workers a COLUMNS of 80, which commands that draw would take for their user's wish. By itself hypothesis
fails an example that takes more than 0.2 s, and a test whose first examples take more than a second to make: what a busy machine
does to any of them at any time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.pop("COLUMNS", None)
settings.register_profile("busy machine", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
