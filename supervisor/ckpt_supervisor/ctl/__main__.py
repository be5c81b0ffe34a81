"""`python -m ckpt_supervisor.ctl`, the same as `ckptctl`. Owns nothing."""

from __future__ import annotations

import sys

from ckpt_supervisor.ctl.main import main

if __name__ == "__main__":
    sys.exit(main())
