#!/usr/bin/env python3
"""Posts one line of text for each event to a webhook, as chat services take it: {"text": "..."}.

For `ckpt-supervise --on-event`: takes one line of the journal on standard input. Standard library only. Must end within the 10 s
that such a command has, so its own time is shorter.

    WEBHOOK_URL=https://chat.example/hooks/... ckpt-supervise --on-event 'python3 post_webhook.py' ...
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 5.0
LINE_BYTES_MAX = 1_000_000
TOLD = ("cause", "outcome", "step", "result", "code", "text", "line", "reason")
TEXT_CHARS_MAX = 500


def text_of(event: dict[str, Any]) -> str:
    """For people: which job, what happened, and what the event says of it."""
    said = [
        f"{name} {event[name]}" if name in ("step", "code") else str(event[name])
        for name in TOLD
        if event.get(name) not in (None, "")
    ]
    name = str(event.get("event", "")).replace("_", " ")
    return f"job {event.get('job')} (attempt {event.get('attempt')}): {name}{': ' if said else ''}{', '.join(said)}"[
        :TEXT_CHARS_MAX
    ]


def main() -> int:
    """Post it."""
    url = os.environ.get("WEBHOOK_URL", "")
    if not url.startswith(("https://", "http://")):
        sys.stderr.write("post_webhook: WEBHOOK_URL is not set to an http(s) address\n")
        return 1
    try:
        event = json.loads(sys.stdin.buffer.read(LINE_BYTES_MAX))
        body = json.dumps({"text": text_of(event)}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked above
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 - checked above
            return 0
    except (ValueError, AttributeError, urllib.error.URLError, OSError) as error:
        sys.stderr.write(f"post_webhook: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
