"""A real browser without a window: Debian's Chromium, driven by playwright, with no way out.

Owns finding it, installing it where it is absent and may be installed (root with apt: CI begins with a bare machine), and
pages that let no request out. Must not let playwright download a browser of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
INSTALL_S = 600
START_MS = 60_000
ACTION_MS = 60_000
FRAMES_MAX = 2_000


class NoBrowser(AssertionError):
    """There is none, and none could be installed; the message says what to do."""


def executable() -> str:
    """The browser's path; installed first where there is none. Raises NoBrowser."""
    with _alone():  # What another worker is about to install has its name before it can be run.
        if _found() is None:
            if shutil.which("apt-get") is None or os.geteuid() != 0:
                raise NoBrowser("no Chromium here; as root: apt-get install --no-install-recommends chromium")
            _apt_get("update")
            _apt_get("install", "--no-install-recommends", "chromium")
    found = _found()
    if found is None:
        raise NoBrowser("apt-get has installed chromium, and there is still no program of that name")
    return found


def _found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """pytest runs several workers: apt's own lock would have the second one fail."""
    place = Path(tempfile.gettempdir()) / f"ckpt-supervise-tests-{os.geteuid()}.apt.lock"
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _apt_get(*words: str) -> None:
    argv = ["apt-get", "-q", "-y", "-o", f"DPkg::Lock::Timeout={INSTALL_S}", *words]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise NoBrowser(f"{' '.join(argv)} failed with {done.returncode}: {lines[-1]}")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser. Its sandbox stays on but for root, for whom Chromium refuses it."""
    path = executable()
    os.environ["PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD"] = "1"
    from playwright.sync_api import sync_playwright

    # A container's /dev/shm is often too small for a renderer; what else it asks of the network at its start is switched off.
    args = ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    args += ["--disable-gpu", "--disable-extensions", "--disable-sync"]
    args += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=args, timeout=START_MS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page that was opened, and everything that it did which it must not do."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        """Errors and warnings of the console, and exceptions that nobody caught."""
        self.requests: list[str] = []
        """Requests for anything but the file itself."""
        own = path.as_uri()
        page.on(
            "console", lambda said: self.errors.append(f"{said.type}: {said.text}") if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("popup", lambda other: self.errors.append(f"a window: {other.url}"))
        page.on("request", lambda asked: self._asked(asked.url, own))
        page.goto(own)

    def _asked(self, url: str, own: str) -> None:
        if url.split("#", maxsplit=1)[0] != own and not url.startswith("data:"):
            self.requests.append(url)

    def drawn(self, colours: str) -> None:
        """Wait until the charts stand in these colours."""
        self.page.wait_for_selector(f'html[data-drawn="{colours}"]', state="attached")

    def until(self, fact: str) -> None:
        """Wait, frame by frame, until this expression is true. playwright's own wait would eval it, which the page forbids."""
        for _ in range(FRAMES_MAX):
            if self.page.evaluate(fact):
                return
            self.page.evaluate("() => new Promise((go) => requestAnimationFrame(() => go()))")
        raise AssertionError(f"not true after {FRAMES_MAX} frames: {fact}")


@contextlib.contextmanager
def visit(browser: Any, path: Path, width: int = 1280, **how: Any) -> Iterator[Visit]:
    """Open a file in a profile of its own, offline. `how`: color_scheme, reduced_motion, ... of playwright's new_context."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **how)
    context.set_default_timeout(ACTION_MS)
    context.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
    try:
        yield Visit(context.new_page(), path)
    finally:
        context.close()
