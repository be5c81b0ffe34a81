"""--metrics-file and --metrics-port with a real supervisor: what a scraper finds, and that nothing about them can harm a run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.watches import scrape
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from tests.support.run import eventually, supervised, toy, trained

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FOR_EVER = ("--steps", 1_000_000, "--step-ms", 5)


def values(text: str) -> dict[str, float]:
    """By name; of those with labels of their own the last one."""
    return {sample.name: sample.value for family in prometheus(text) for sample in family.samples}


def test_the_file_and_the_port_show_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Readable by node_exporter whatever the umask; nothing but the file is left there; the end is in it."""
    place = tmp_path / "prom"
    place.mkdir()
    path = place / "run-{job}.prom"
    prefix = ("sh", "-c", 'umask 077; exec "$@"', "sh")
    options = ("--metrics-file", path, "--metrics-port", 0, "--every-steps", 20)
    with trained(tmp_path, *FOR_EVER, options=options, prefix=prefix) as run:
        url = run.event("metrics_served")["url"]
        run.event("commit")
        run.event("memory")
        port = int(url.removeprefix("http://127.0.0.1:").removesuffix("/metrics"))
        found = values(answered(port, b"GET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2].decode())
        request = f"GET /metrics HTTP/1.1\r\nAccept: {OPENMETRICS}\r\n\r\n".encode()
        head, _, body = answered(port, request).partition(b"\r\n\r\n")
        assert b"Content-Type: application/openmetrics-text" in head
        assert list(openmetrics(body.decode()))
        assert found["ckpt_supervise_committed_step"] >= 20
        assert found["ckpt_supervise_tree_memory_bytes"] > 5e6
        run.signal(signal.SIGTERM)
        assert run.code() == 75
        last = run.event("leaving")["step"]
    (file,) = place.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    assert "{" not in file.name
    found = values(file.read_text())
    assert (found["ckpt_supervise_exit_code"], found["ckpt_supervise_committed_step"]) == (75, last)


def test_a_port_in_use_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """Two runs on one node, and one configuration."""
    with scrape.listen(0) as taken:
        port = taken.getsockname()[1]
        with supervised(tmp_path, toy("--steps", 3), "--metrics-port", port) as run:
            assert run.code() == 0
            assert run.err.count(f"--metrics-port {port}: Address already in use; the run goes on without it") == 1
            assert run.event("metrics_failed")["what"] == "port"


def test_a_directory_that_vanishes_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    """Saves go on meanwhile; when the directory is there again so is the file."""
    place = tmp_path / "prom"
    place.mkdir()
    options = ("--metrics-file", f"{place}/", "--every-steps", 20)
    with trained(tmp_path, *FOR_EVER, options=options) as run:
        eventually(lambda: list(place.iterdir()), "the file")
        place.rename(tmp_path / "elsewhere")
        assert run.event("metrics_failed")["what"] == "file"
        first = run.event("commit")["step"]
        eventually(lambda: run.event("commit")["step"] >= first + 60, "more commits")
        place.mkdir()
        eventually(lambda: list(place.glob("*.prom")), "the file again")
        assert run.err.count("--metrics-file") == 1
        assert len(run.events("metrics_failed")) == 1


def test_a_full_disk_leaves_the_older_file_and_no_half_one(tmp_path: Path) -> None:
    """As with ENOSPC: here a file may not grow beyond 10 bytes."""
    code = (
        "import resource, sys; from pathlib import Path; from ckpt_supervisor.watches.metrics import put\n"
        "put(Path(sys.argv[1]), b'old\\n')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: put(Path(sys.argv[1]), b'new ' * 1000)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.prom")], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.prom"]
    assert (tmp_path / "a.prom").read_text() == "old\n"


def test_a_link_in_the_way_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    """The directory may be one that others write into."""
    code = (
        "import os, sys; from pathlib import Path; from ckpt_supervisor.watches.metrics import put\n"
        "path = Path(sys.argv[1]); trap = path.with_name(f'.{path.name}.{os.getpid()}.new')\n"
        "trap.symlink_to(path.with_name('victim')); put(path, b'x 1\\n')\n"
    )
    (tmp_path / "victim").write_text("mine")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.prom")], check=True)
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.prom", "victim"]


def test_the_library_is_not_there_unless_it_is_asked_for() -> None:
    """4 MB in every supervisor, and 70 ms."""
    watches = ("control", "memory", "hangs", "progress", "metrics", "notify")
    names = ("cli", "app", *(f"watches.{name}" for name in watches))
    code = f"import sys, {', '.join(f'ckpt_supervisor.{name}' for name in names)}; print('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.fixture
def port() -> Iterator[int]:
    """A port that answers `x 1`."""
    listener = scrape.listen(0)
    scrape.serve(listener, lambda accept: (b"x 1\n", f"text/plain; accept={accept}"))
    yield listener.getsockname()[1]
    scrape.close(listener)


def ask(port: int, request: bytes) -> bytes:
    """All that is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        parts = []
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def answered(port: int, request: bytes) -> bytes:
    """The answer of another process: one that was held up for half a second between connecting and asking gets none."""
    return eventually(lambda: ask(port, request), "an answer")


@pytest.mark.parametrize(
    ("request_", "begins"),
    [
        (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: a/b\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; accept=a/b\r\n",
        ),
        (b"GET /?x=1 HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 "),
        (b"\x00\xff\r\n\r\n", b"HTTP/1.1 405 "),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", b"HTTP/1.1 200 OK\r\n"),
        (b"GET /metrics", b""),
        (b"", b""),
    ],
)
def test_what_is_asked_is_answered_or_refused(port: int, request_: bytes, begins: bytes) -> None:
    """And the next one is answered after it, whatever it was."""
    answer = ask(port, request_)
    assert answer.startswith(begins)
    assert (answer == b"") == (begins == b"")
    assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\nx 1\n")


def test_head_has_no_body(port: int) -> None:
    """But the length that the body would have."""
    answer = ask(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 4\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_clients_that_say_nothing_hold_up_others_for_a_bounded_time(port: int) -> None:
    """Half a second each at most; a client that never ends its request is no different."""
    silent = socket.create_connection(("127.0.0.1", port))
    endless = socket.create_connection(("127.0.0.1", port))
    endless.sendall(b"GET /metrics HTTP/1.1\r\nx: ")
    try:
        assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n").endswith(b"x 1\n")
    finally:
        for client in (silent, endless):
            client.close()


def test_nobody_on_another_host_reaches_it(port: int) -> None:
    """It is bound to loopback, not to every address of this host."""
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.2", port), timeout=60):
        pass


def test_a_closed_port_is_free_again() -> None:
    """The thread ends with it."""
    listener = scrape.listen(0)
    number = listener.getsockname()[1]
    scrape.serve(listener, lambda _: (b"", ""))
    scrape.close(listener)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((scrape.HOST, number))  # Bound and not listened at: nobody else on this host is given it meanwhile.
        with pytest.raises(OSError, match="refused"):
            ask(number, b"")
        scrape.close(scrape.listen(number))
