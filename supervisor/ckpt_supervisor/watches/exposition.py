"""Numbers as Prometheus reads them: one family of samples for each, by prometheus-client.

Owns names, help texts and labels (docs/metrics.md). Imported only where --metrics-file or --metrics-port is given, in the lane,
when the command runs. Must not use the library's own registry, which counts Python's garbage and more of the kind.

The job's label is `job_id`: `job` is Prometheus' own name for what it scrapes, and it would rename ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.exposition import choose_encoder, generate_latest

from ckpt_supervisor.core.state import Phase
from ckpt_supervisor.watches.numbers import Counts, Durations, Numbers

PREFIX = "ckpt_supervise_"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' own format, which everybody reads."""


class Shown:
    """A collector. `labels`: which supervisor it is; `info`: what else is told of it; `lost`: how many lines the journal lost.

    It only reads: numbers are stored by the loop's thread, and each is whole.
    """

    def __init__(self, numbers: Numbers, labels: Mapping[str, str], info: Mapping[str, str], lost: Callable[[], int]) -> None:
        self._numbers = numbers
        self._names = [*labels]
        self._values = [*labels.values()]
        self._info = dict(info)
        self._lost = lost
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self.registry)

    def negotiated(self, accept: str) -> tuple[bytes, str]:
        """In the format that whoever asks prefers, and its content type."""
        try:
            encoder, content_type = choose_encoder(accept)
            return encoder(self.registry), content_type
        except (ValueError, TypeError, IndexError):  # What it does not expect there, such as a version of letters.
            return self.text(), CONTENT_TYPE

    def collect(self) -> Iterator[Metric]:
        """All that is known now."""
        info = InfoMetricFamily(f"{PREFIX}attempt", "This start of the job step.", labels=self._names)
        info.add_metric(self._values, self._info)
        yield info
        if self._numbers.phase:
            phases = StateSetMetricFamily(f"{PREFIX}phase", "Where the supervisor stands; 1 for one of them.", labels=self._names)
            phases.add_metric(self._values, {phase.name: phase.name == self._numbers.phase for phase in Phase})
            yield phases
            yield from self._of_saves()
        yield from self._of_training()
        yield from self._of_trouble()

    def _of_training(self) -> Iterator[Metric]:
        one = self._numbers
        yield from self._gauge("step", "Finished steps, of the rank that is least far; at most 15 s old.", one.step)
        yield from self._gauge("step_duration_seconds", "Mean time of a step lately, saves included.", one.step_s, "seconds")
        yield from self._gauge("resume_step", "Step of the checkpoint that the command was started from.", one.resume_step)
        yield from self._gauge("start_timestamp_seconds", "When the command was started last.", one.started_at_s, "seconds")
        text = "Resident and not shared, all processes of this task."
        yield from self._gauge("tree_memory_bytes", text, one.tree_bytes, "bytes")
        if one.limit is not None:
            name, used, limit = one.limit
            yield from self._gauge("memory_used_bytes", "In use of the nearest limit.", used, "bytes", {"limit_of": name})
            yield from self._gauge("memory_limit_bytes", "The nearest limit of memory.", limit, "bytes", {"limit_of": name})

    def _of_saves(self) -> Iterator[Metric]:
        one = self._numbers
        yield from self._gauge("committed_step", "Step of the newest checkpoint of this start.", one.committed_step)
        text = "When the newest checkpoint of this start was committed."
        yield from self._gauge("last_commit_timestamp_seconds", text, one.committed_at_s, "seconds")
        yield from self._gauge("checkpoint_bytes", "Size of that checkpoint, as verified.", one.checkpoint_bytes, "bytes")
        yield self._counts("saves", "Saves by what came of them.", "result", one.saves)
        yield self._durations("save_duration_seconds", "From Go to the last rank's word that it has written.", one.save)
        yield self._durations("hold_duration_seconds", "For how long a save held training.", one.hold)
        yield self._durations("verify_duration_seconds", "Verification and commit.", one.verify)

    def _of_trouble(self) -> Iterator[Metric]:
        one = self._numbers
        kill_ms = one.kill_mono_ms
        left_s = None if kill_ms is None else max(0.0, kill_ms / 1_000 - time.monotonic())
        yield from self._gauge("notice_left_seconds", "Time until the kill while a notice is in force.", left_s, "seconds")
        yield self._counts("notices", "Notices by cause, each cause that one was told with.", "cause", one.notices)
        yield self._counts("requeues", "What calls for a requeue came to.", "result", one.requeues)
        yield self._counter("restarts", "Starts of the command in place.", one.restarts)
        yield self._counter("hangs", "Times that training stood still.", one.hangs)
        yield self._counter("oom_kills", "Processes of ours that the kernel killed for lack of memory.", one.oom_kills)
        yield self._counts("journal_lines", "Lines of the journal.", "level", one.lines)
        yield self._counter("journal_lines_lost", "Lines that could not be written to the journal.", self._lost())
        text = "Commands of --on-event that failed, and events that were dropped."
        yield self._counts("event_commands", text, "problem", one.event_commands)
        yield from self._gauge("exit_code", "Status that the supervisor exits with; absent while it runs.", one.exit_code)

    def _gauge(
        self, name: str, text: str, value: float | None, unit: str = "", more: Mapping[str, str] | None = None
    ) -> Iterator[Metric]:
        if value is None:
            return
        more = more or {}
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[*self._names, *more], unit=unit)
        family.add_metric([*self._values, *more.values()], value)
        yield family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counts(self, name: str, text: str, label: str, counts: Counts) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[*self._names, label])
        for key, count in counts.items:
            family.add_metric([*self._values, key], count)
        return family

    def _durations(self, name: str, text: str, durations: Durations) -> Metric:
        family = HistogramMetricFamily(f"{PREFIX}{name}", text, labels=self._names, unit="seconds")
        family.add_metric(self._values, buckets=durations.buckets, sum_value=durations.sum_s)
        return family
