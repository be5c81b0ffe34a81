"""Findings from facts: what is wrong, with its numbers, and what to do; and silence where all is well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.adapters.slurm import SlurmEnv
from ckpt_supervisor.adapters.slurm_text import Partition, SlurmConfig, parse_config, parse_partition
from ckpt_supervisor.doctor import at_start, notice_rules, place_rules, probe, slurm_rules
from ckpt_supervisor.doctor.facts import Held, JobFacts, Place, Setup, Srun, Temporary, Versions, Wishes
from ckpt_supervisor.doctor.finding import Finding, wrong
from msgspec.structs import replace

TEXTS = Path(__file__).resolve().parents[1] / "support" / "proc_slurm_texts"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
RULES = Path(slurm_rules.__file__).parent
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}

SITE = SlurmConfig(
    30_000, "cgroup", "24.11.5", (), wait_s=0, kill_on_bad_exit=False, job_requeue=True, file_append=False, preempts=True,
    preempt_mode="REQUEUE", sends_user_signal=False,
)  # fmt: skip
LOW = Partition("low", 120_000, "REQUEUE", "UNLIMITED", "NONE", "x[1-4]", 4)
GOOD = Setup("step", job=JobFacts("77", True, True, False), site=SITE, partition=LOW, tasks=1, open_mode="a")
FINE = Place(
    "/ck", True, "/ck", kind="lustre", free_bytes=10**12, free_files=10**6, write="", fsync="", rename="", directory_fsync="",
    links="", skew_ms=3,
)  # fmt: skip


def all_of(setup: Setup) -> dict[str, Finding]:
    """Everything that is wrong in this set-up, by id."""
    return {finding.id: finding for finding in wrong([*slurm_rules.findings(setup), *notice_rules.findings(setup)])}


def ids(found: list[Finding]) -> list[str]:
    """Ids of what is wrong."""
    return [finding.id for finding in wrong(found)]


def early(env: dict[str, str], scontrol: bool = True, **wishes: Any) -> dict[str, Finding]:
    """What a start says at once."""
    slurm = SlurmEnv.from_environ(env)
    assert slurm is not None
    return {finding.id: finding for finding in at_start.early(slurm, env, Wishes(**wishes), scontrol)}


def test_a_start_says_what_the_environment_shows_with_what_to_do_about_it() -> None:
    """Not under srun, no scontrol, no watch, a further srun, another tool that requeues; a good one is silent."""
    assert early(SRUN) == {}
    assert "write `srun ckpt-supervise -- ...`" in early({"SLURM_JOB_ID": "77"})["srun"].line
    assert "--requeue exit:N" in early(SRUN, scontrol=False)["scontrol"].advice
    assert "--signal=USR1@90" in early(SRUN, watched=False)["lead-off"].text
    nested = early(SRUN, command=("bash", "-c", "srun -n2 python train.py"))["nested-srun"]
    assert "kills its tasks before they can save" in nested.text
    assert "submitit" in early({**SRUN, "SUBMITIT_EXECUTOR": "slurm"})["two-owners"].text
    assert "submitit" in early(SRUN, command=("python", "-m", "submitit.core._submit"))["two-owners"].text
    assert len(early({"SLURM_JOB_ID": "77"}, scontrol=False, watched=False)) == 3


def test_a_job_that_cannot_come_back_is_told_about() -> None:
    """No batch job, or Requeue=0; not if the user does not want a requeue anyway."""
    assert all_of(GOOD) == {}
    no_batch = replace(GOOD, job=JobFacts("77", True, False, False))
    assert "no batch job" in all_of(no_batch)["batch-job"].text
    forbidden = replace(GOOD, job=JobFacts("77", False, True, False))
    assert "submit it with --requeue" in all_of(forbidden)["requeue"].advice
    assert all_of(replace(forbidden, wishes=Wishes(wants_requeue=False))) == {}
    exits = Wishes(wants_requeue=False, requeue_exit=85)
    assert list(all_of(replace(GOOD, wishes=exits))) == ["requeue-exit"]
    assert all_of(replace(GOOD, wishes=exits, site=SlurmConfig(30_000, "cgroup", "", (85,)))) == {}


@pytest.mark.parametrize(
    ("grace_ms", "mode", "saves_ms", "expected"),
    [
        (15_000, "REQUEUE", (30_000,), ["grace"]),
        (15_000, "REQUEUE", (9_000, 30_000), ["grace"]),
        (15_000, "REQUEUE", (9_000,), []),
        (15_000, "REQUEUE", (), []),
        (0, "REQUEUE", (5_000,), ["grace"]),
        (0, "OFF", (30_000,), []),
        (60_000, "CANCEL", (9_000,), ["preempt-cancel"]),
        (0, "CANCEL", (), ["preempt-cancel"]),
        (0, "", (30_000,), ["grace"]),
    ],
)
def test_the_grace_is_held_against_the_slowest_of_the_newest_saves(
    grace_ms: int, mode: str, saves_ms: tuple[int, ...], expected: list[str]
) -> None:
    """GraceTime and KillWait together, less the shares of verify, leave and requeue; where nothing preempts nothing is said."""
    site = SlurmConfig(6_000, "cgroup", "", (), preempts=True, preempt_mode="REQUEUE")
    seen = replace(GOOD, site=site, partition=Partition("low", grace_ms, mode, "", "", "", 4), saves_ms=saves_ms)
    assert list(all_of(seen)) == expected
    assert all_of(replace(seen, site=SlurmConfig(6_000, "cgroup", "", (), preempts=False))) == {}


def test_kill_wait_is_a_note_where_a_watch_saves_before_the_limit_and_a_warning_where_none_does() -> None:
    """It is all that is left at a scancel in either case; with --lead off also at the limit."""
    seen = replace(GOOD, saves_ms=(40_000,), partition=None)
    (noted,) = [finding for finding in notice_rules.findings(seen) if finding.id == "kill-wait"]
    assert noted.severity == "note"
    assert "KillWait 30 s leaves" in noted.text
    assert "the last save took 40 s" in noted.text
    assert "kill-wait" in all_of(replace(seen, wishes=Wishes(watched=False)))


def test_options_of_the_steps_own_srun_count_and_not_those_of_its_neighbours() -> None:
    """Two sruns side by side: only ours is judged; --wait=0 takes the site's WaitTime back."""
    mine, other = Srun("process 1", {}, (), ("a",)), Srun("process 2", {"wait": "5"}, (), ("b",), directory="x")
    assert at_start.own([mine, other], ("a",)) == mine
    assert at_start.own([mine, mine], ("a",)) is None
    seen = replace(GOOD, tasks=4, sruns=(mine, other), srun=mine)
    assert all_of(seen) == {}
    assert list(all_of(replace(seen, srun=other))) == ["srun-wait"]
    waits = replace(seen, site=SlurmConfig(30_000, "cgroup", "", (), wait_s=30))
    assert list(all_of(waits)) == ["srun-wait"]
    assert all_of(replace(waits, srun=Srun("process 1", {"wait": "0"}, (), ("a",)))) == {}


def test_the_texts_of_both_versions_are_read() -> None:
    """Configuration and partition, as recorded; what is not in them is not known."""
    for version in ("22.05", "24.11"):
        site = parse_config((TEXTS / f"{version}-config.txt").read_text())
        assert (site.preempts, site.preempt_mode) == (True, "REQUEUE")
        partition = parse_partition((TEXTS / f"{version}-partition.txt").read_text())
        assert partition is not None
        assert (partition.name, partition.preempt_mode, partition.node_count) == ("low", "REQUEUE", 3)
    assert parse_config("SlurmctldParameters = idle_on_node_suspend,preempt_send_user_signal").sends_user_signal is True
    assert parse_config("PreemptParameters = send_user_signal").sends_user_signal is True
    assert parse_config("PreemptParameters = reorder_count=1").sends_user_signal is False
    assert parse_config("").sends_user_signal is None
    assert parse_partition("slurm_load_partitions error") is None


@pytest.mark.parametrize(
    ("changes", "nodes", "expected"),
    [
        ({}, 4, []),
        ({"kind": "ext4"}, 4, ["dir-not-shared"]),
        ({"kind": "ext4"}, 1, ["dir-not-shared"]),
        ({"kind": "tmpfs"}, 1, ["dir-not-shared"]),
        ({"fsync": "EINVAL: Invalid argument"}, 1, ["dir-no-fsync"]),
        ({"rename": "EEXIST: File exists"}, 1, ["dir-no-rename"]),
        ({"directory_fsync": "harmless: EINVAL: Invalid argument"}, 1, []),
        ({"directory_fsync": "EIO: Input/output error"}, 1, ["dir-no-fsync"]),
        ({"links": "EOPNOTSUPP: Operation not supported"}, 1, []),
        ({"write": "EDQUOT: Disk quota exceeded"}, 1, ["dir-not-writable"]),
        ({"skew_ms": -90_000}, 1, ["clock-skew"]),
        ({"skew_ms": 1_500}, 1, []),
        ({"free_files": 12}, 1, ["dir-no-files"]),
        ({"free_files": None}, 1, []),
        ({"free_bytes": 100}, 1, ["dir-full"]),
        ({"free_bytes": 25, "needed_bytes": 10}, 1, ["dir-full"]),
        ({"free_bytes": 25, "needed_bytes": 10, "checkpoints": 2}, 1, []),
        ({"free_bytes": 10**9, "usable_bytes": 5, "needed_bytes": 10, "quota": "EDQUOT"}, 1, ["dir-full"]),
    ],
)
def test_a_directory_is_judged_by_what_the_probe_found(changes: dict[str, Any], nodes: int, expected: list[str]) -> None:
    """One thing wrong at a time, and what only has to be known is no warning."""
    assert ids(place_rules.directory(replace(FINE, **changes), nodes, None, keep=3)) == expected


def test_a_disk_that_did_not_answer_is_unknown_and_never_good() -> None:
    """With the stage that it hung at; a local disk is well where all nodes are one machine."""
    (hung,) = place_rules.directory(replace(FINE, problem="writing to it: no answer within 20 s"), 1, None, 3)
    assert (hung.severity, hung.id) == ("unknown", "dir-unknown")
    assert "no answer within 20 s" in hung.text
    assert ids(place_rules.directory(replace(FINE, kind="ext4"), 4, one_machine=True, keep=3)) == []


def test_who_holds_the_directory_is_judged_by_whether_it_lives() -> None:
    """Alive, dead, nobody, and could not tell."""
    assert ids(place_rules.held(Held("job 5", alive=True, why="Slurm says RUNNING"))) == ["dir-held"]
    assert ids([*place_rules.held(Held("job 5", alive=False)), *place_rules.held(None)]) == []
    assert place_rules.held(Held("job 5", None, "no Slurm"))[0].severity == "unknown"


def test_the_socket_goes_to_the_first_place_that_will_do() -> None:
    """TMPDIR too long: the next one; nowhere: an error; a directory that others may change: named with its mode."""
    good, long = Temporary("/tmp", is_first=False), Temporary("/x", is_first=True, problem="a path of 160 bytes")
    (found,) = place_rules.temporary([long, good])
    assert found.severity == "warning"
    assert "/tmp is used instead" in found.text
    assert place_rules.temporary([long])[0].severity == "error"
    wide = Temporary("/w", is_first=True, is_open=True, owner="mode 0777, writable for others and not sticky")
    assert ids(place_rules.temporary([wide])) == ["tmpdir-open"]
    assert ids(place_rules.temporary([good])) == []


def test_versions_that_differ_between_training_and_supervisor_are_a_warning() -> None:
    """None there is a note: a program may save by itself."""
    here = Versions("3.12.1", "0.1.0", {"msgspec": "0.19"})
    assert ids(place_rules.versions(here)) == []
    there = replace(here, training_python="/v/bin/python", training={"ckpt-supervise": "0.0.9"})
    assert ids(place_rules.versions(there)) == ["versions-differ"]
    assert place_rules.versions(replace(there, training={}))[-1].severity == "note"
    assert place_rules.versions(replace(there, training=None))[-1].severity == "unknown"


def test_every_id_is_described_and_the_short_form_says_only_ids_that_there_are() -> None:
    """docs/doctor.md has each id of the code once, and no other."""
    sources = [*RULES.glob("*_rules.py"), RULES.parent / "ctl" / "doctor.py"]
    text = "\n".join(path.read_text() for path in sources)
    names = set(re.findall(r"\b(?:error|warning|note|unknown|ok)\)?\(\s*\"([a-z-]+)\"", text))
    names |= {"srun-wait", "srun-kill-on-bad-exit"}
    described = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(names)
    assert names >= at_start.SAID


def test_a_mount_point_is_read_as_it_is_called() -> None:
    """Octal digits for blanks; an umlaut is no two letters, and the file system below it is not taken for the one above it."""
    assert [probe.unescaped(field) for field in ("/mnt/a\\040b", "/mnt/dätä", "/a\\134b")] == ["/mnt/a b", "/mnt/dätä", "/a\\b"]
