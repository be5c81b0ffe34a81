"""What holds for all tests: they see the width that they ask for.

pytest-xdist gives its workers a COLUMNS of 80, which commands that draw would take for their user's wish.
"""

from __future__ import annotations

import os

os.environ.pop("COLUMNS", None)
