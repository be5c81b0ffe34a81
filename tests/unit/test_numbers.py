"""What Prometheus is shown: every number from the lines it comes from, in text that the real parsers of both formats take."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.watches.exposition import PREFIX, Shown
from ckpt_supervisor.watches.numbers import NAMES_MAX, Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "ckpt-supervise.json"
SCHEMA = ROOT / "tests" / "support" / "schemas" / "grafana-dashboard.json"
DOCS = ROOT / "docs" / "metrics.md"
WHO = {"job_id": "100_3", "attempt": "2", "task": "0"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

LINES: list[tuple[str, str, dict[str, Any]]] = [
    ("command_started", "info", {"restart": 0, "resume_step": 100, "command": ["x"]}),
    ("command_started", "info", {"restart": 1, "resume_step": 100, "command": ["x"]}),
    ("progress", "debug", {"step": 140, "ahead": 141, "per_step_ms": 250.0, "phase": ""}),
    ("memory", "debug", {"tree_bytes": 5_000, "used_bytes": 7_000, "limit_bytes": 9_000, "limit_of": "/a\n\"b\\"}),
    ("verified", "info", {"round": 1, "mode": "full", "problem": "", "bytes": 600}),
    ("verified", "info", {"round": 1, "mode": "full", "problem": "", "bytes": 400, "of_task": 1}),
    ("commit", "info", {"round": 1, "step": 150, "result": "committed", "save_ms": 2_000, "hold_ms": 3_000, "verify_ms": 40}),
    ("round_given_up", "warning", {"round": 2, "reason": "ENOSPC"}),
    ("hang_suspected", "warning", {"text": "no progress"}),
    ("stalled", "warning", {"text": "no progress"}),
    ("stalled", "warning", {"text": "no progress", "of_task": 3}),
    ("oom_kill", "warning", {"kills": 2}),
    ("notice", "info", {"cause": "not known", "left_ms": 90_000}),
    ("notice", "info", {"cause": "preempted", "left_ms": 90_000}),
    ("notice", "info", {"cause": "preempted", "left_ms": 60_000}),
    ("phase", "debug", {"before": "RUNNING", "after": "LEAVING"}),
    ("requeue", "info", {"result": "accepted", "reason": ""}),
    ("event_command_failed", "warning", {"of_event": "notice", "reason": "it ended with 1"}),
    ("event_command_dropped", "warning", {"events": {"notice": 4}, "dropped": 4, "reason": "16 were waiting"}),
    ("exit", "info", {"code": 75, "line": "out"}),
]  # fmt: skip


def shown(*lines: tuple[str, str, dict[str, Any]], lost: int = 3) -> Shown:
    """A supervisor that has written these lines just now."""
    numbers = Numbers()
    for event, level, fields in lines:
        numbers.take(Entry(event, level, fields), Stamp(1_700_000_000_000_000_000, time.monotonic_ns() // 1_000_000))
    return Shown(numbers, WHO, {"version": "1", "host": "n1", "dir": "/d"}, lambda: lost)


def samples(text: bytes, parse: Callable[[str], Any] = prometheus) -> dict[str, float]:
    """By name and labels that are not those of every sample."""
    found = {}
    for family in parse(text.decode()):
        for sample in family.samples:
            assert WHO.items() <= sample.labels.items()
            own = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name not in WHO)
            found[sample.name.removeprefix(PREFIX) + (f"{{{own}}}" if own else "")] = sample.value
    return found


def test_every_number_comes_from_its_line() -> None:
    """Counters count what happened once, gauges show what holds last."""
    found = samples(shown(*LINES).text())
    left = found.pop("notice_left_seconds")
    assert 0 < left <= 60
    expected = {
        "step": 150, "step_duration_seconds": 0.25, "committed_step": 150, "resume_step": 100, "checkpoint_bytes": 1_000,
        "last_commit_timestamp_seconds": 1.7e9, "start_timestamp_seconds": 1.7e9, "tree_memory_bytes": 5_000,
        'memory_used_bytes{limit_of=/a\n"b\\}': 7_000, 'memory_limit_bytes{limit_of=/a\n"b\\}': 9_000,
        "saves_total{result=committed}": 1, "saves_total{result=given up}": 1, "notices_total{cause=not known}": 1,
        "notices_total{cause=preempted}": 1, "requeues_total{result=accepted}": 1, "restarts_total": 1, "hangs_total": 2,
        "oom_kills_total": 2, "journal_lines_lost_total": 3, "journal_lines_total{level=warning}": 7,
        "event_commands_total{problem=failed}": 1, "event_commands_total{problem=dropped}": 4, "exit_code": 75,
        "phase{ckpt_supervise_phase=LEAVING}": 1, "phase{ckpt_supervise_phase=RUNNING}": 0,
        "save_duration_seconds_sum": 2, "save_duration_seconds_bucket{le=1.0}": 0, "save_duration_seconds_bucket{le=2.5}": 1,
        "hold_duration_seconds_sum": 3, "verify_duration_seconds_bucket{le=0.1}": 1, "verify_duration_seconds_count": 1,
        "attempt_info{dir=/d,host=n1,version=1}": 1,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("lines", [[], LINES], ids=["nothing yet", "everything"])
def test_both_formats_are_valid_and_say_the_same(lines: list[tuple[str, str, dict[str, Any]]]) -> None:
    """By the library's own strict parsers; which one is answered is asked for."""
    one = shown(*lines)
    text, plain_type = one.negotiated("text/plain")
    strict, strict_type = one.negotiated(f"{OPENMETRICS},text/plain;q=0.5")
    assert plain_type.startswith("text/plain")
    assert strict_type.startswith("application/openmetrics-text")
    assert strict.endswith(b"# EOF\n")
    plain, open_ = samples(text), samples(strict, openmetrics)
    plain.pop("notice_left_seconds", None)
    open_.pop("notice_left_seconds", None)
    assert plain == open_


@settings(max_examples=200, deadline=None)
@given(accept=st.one_of(st.text(), st.from_regex(r"(application/openmetrics-text|text/plain)(; ?(version|escaping)=.*)*")))
def test_whatever_a_client_accepts_it_gets_something(accept: str) -> None:
    """Anybody on the host may ask, and the answer comes from a thread that nobody starts again."""
    body, content_type = shown(*LINES).negotiated(accept)
    assert body
    assert content_type.isprintable()


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=200))
def test_whatever_is_in_a_name_the_text_stays_valid(text: str) -> None:
    """A cgroup, a cause or a directory may have any name."""
    text = text.encode(errors="replace").decode()
    one = shown(
        ("memory", "debug", {"tree_bytes": 1, "used_bytes": 1, "limit_bytes": 2, "limit_of": text}),
        ("notice", "info", {"cause": text, "left_ms": 1}),
    )
    assert samples(one.negotiated(OPENMETRICS)[0], openmetrics)["tree_memory_bytes"] == 1


def test_what_is_not_known_is_absent_and_a_task_that_follows_shows_no_saves() -> None:
    """No step 0 before the first word, no phase of somebody who decides nothing."""
    found = samples(shown().text())
    assert {"step", "committed_step", "notice_left_seconds", "exit_code"}.isdisjoint(found)
    numbers = Numbers()
    numbers.phase = ""
    names = {name.partition("{")[0] for name in samples(Shown(numbers, WHO, {}, lambda: 0).text())}
    assert names.isdisjoint({"phase", "saves_total", "save_duration_seconds_count"})


def test_a_notice_that_was_none_takes_its_time_back() -> None:
    """And the next one counts again."""
    notice = ("notice", "info", {"cause": "signal", "left_ms": 5_000})
    found = samples(shown(notice, ("notice_over", "info", {"reason": "no end is near"})).text())
    assert "notice_left_seconds" not in found
    again = samples(shown(notice, ("notice_over", "info", {"reason": ""}), notice).text())
    assert again["notices_total{cause=signal}"] == 2


def test_a_label_does_not_grow_without_bound() -> None:
    """A cause is one of a few words; if it ever were not, Prometheus would choke on it."""
    lines = [("requeue", "info", {"result": f"r{number}", "reason": ""}) for number in range(3 * NAMES_MAX)]
    found = {name: value for name, value in samples(shown(*lines).text()).items() if name.startswith("requeues_total")}
    assert len(found) == NAMES_MAX + 1
    assert found["requeues_total{result=other}"] == 2 * NAMES_MAX


def exported() -> set[str]:
    """Names of all samples, without buckets' suffixes of their own."""
    return {name.partition("{")[0] for name in samples(shown(*LINES).text())}


def test_the_documents_list_every_metric() -> None:
    """docs/metrics.md has a row for each, and for none that does not exist."""
    rows = re.findall(r"^\| `(ckpt_supervise_\w+)` \|", DOCS.read_text(), re.MULTILINE)
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert sorted(row.removeprefix(PREFIX) for row in rows) == sorted(names)


def test_the_dashboard_is_one_by_grafanas_definition() -> None:
    """The fields that it uses, their types and bounds; panels have numbers of their own and do not lie on each other."""
    dashboard = json.loads(DASHBOARD.read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(dashboard)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert cells.isdisjoint(own), panel["title"]
        cells |= own
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + number) for number in range(len(panel["targets"]))]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) <= variables


def test_every_metric_that_the_dashboard_asks_for_exists() -> None:
    """And nearly every one that exists is shown."""
    text = DASHBOARD.read_text()
    asked = set(re.findall(rf"{PREFIX}(\w+?)(?=[{{\s,)])", " ".join(expressions(json.loads(text)))))
    asked.discard("phase")  # Also a label's name, in braces.
    assert asked <= exported()
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() - asked} <= {
        "phase", "save_duration_seconds", "hold_duration_seconds", "verify_duration_seconds",
    }  # fmt: skip


def expressions(node: Any) -> list[str]:
    """All queries of a dashboard."""
    if isinstance(node, dict):
        return [value for key, value in node.items() if key in ("expr", "query") and isinstance(value, str)] + [
            found for value in node.values() for found in expressions(value)
        ]
    return [found for value in node for found in expressions(value)] if isinstance(node, list) else []
