"""What Slurm prints, as printed by 22.05.8 and 24.11.5, and who we are in its environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ckpt_supervisor.adapters import slurm, slurm_text
from ckpt_supervisor.core.views import JobView, NoView
from hypothesis import assume, given, settings
from hypothesis import strategies as st

TEXTS = Path(__file__).resolve().parents[1] / "support" / "proc_slurm_texts"
VERSIONS = ("22.05", "24.11")
LOOKED_MS = 1_795_967_256_500


def text(name: str) -> str:
    """One recorded answer."""
    return (TEXTS / f"{name}.txt").read_text()


def view(name: str, our_id: str) -> JobView:
    """The view in a recorded answer."""
    seen = slurm_text.parse_job(text(name), our_id, LOOKED_MS)
    assert isinstance(seen, JobView), seen
    return seen


def wanted(state: str, **fields: object) -> JobView:
    """A view of an ordinary batch job with these fields."""
    usual: dict[str, object] = {
        "reason": "None", "restarts": 0, "end_ms": None, "preempt_ms": None, "grace_ms": None, "requeue": True, "batch": True,
        "looked_ms": LOOKED_MS, "time_limit_unlimited": False,
    }  # fmt: skip
    return JobView(state=state, **{**usual, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "our_id", "expected"),
    [
        ("22.05-preempted", "41012", wanted("RUNNING", end_ms=1795967271000, preempt_ms=1795967251000)),
        ("22.05-preempted_unknown", "41013", wanted("RUNNING", preempt_ms=1795967251000, time_limit_unlimited=True)),
        ("22.05-requeued", "41012", wanted("COMPLETING", restarts=1, end_ms=1795967556000)),
        (
            "22.05-cancelled_in_grace",
            "41013",
            wanted("COMPLETING", end_ms=1795967256000, preempt_ms=1795967251000, time_limit_unlimited=True),
        ),
        ("22.05-salloc", "41016", wanted("RUNNING", batch=False, time_limit_unlimited=True)),
        ("22.05-no_requeue", "41023", wanted("RUNNING", requeue=False, end_ms=1827504624000)),
        ("24.11-preempted", "51000", wanted("RUNNING", end_ms=1795968011000, preempt_ms=1795967991000)),
        ("24.11-preempted_unknown", "51001", wanted("RUNNING", preempt_ms=1795967991000, time_limit_unlimited=True)),
        ("24.11-requeued", "51000", wanted("COMPLETING", restarts=1, end_ms=1795968291000)),
        (
            "24.11-cancelled_in_grace",
            "51001",
            wanted("COMPLETING", end_ms=1795967991000, preempt_ms=1795967991000, time_limit_unlimited=True),
        ),
        ("24.11-salloc", "51008", wanted("RUNNING", batch=False, time_limit_unlimited=True)),
    ],
)
def test_every_recorded_state_is_read_as_it_was(name: str, our_id: str, expected: JobView) -> None:
    """The view holds exactly what scontrol printed."""
    assert view(name, our_id) == expected


def test_the_time_limit_and_a_cancelled_job_differ_by_their_reason() -> None:
    """Both are COMPLETING; only one says TimeLimit."""
    assert (view("22.05-time_limit", "41019").state, view("22.05-time_limit", "41019").reason) == ("COMPLETING", "TimeLimit")
    assert (view("22.05-cancelled", "41022").state, view("22.05-cancelled", "41022").reason) == ("COMPLETING", "None")


@pytest.mark.parametrize(("name", "our_id"), [("22.05-weird_name", "41020"), ("24.11-weird_name", "51000")])
def test_a_name_and_comment_that_look_like_a_record_are_passed_over(name: str, our_id: str) -> None:
    """Both hold blanks, newlines and lines such as `   JobState=CANCELLED`, and change nothing (field case: issue table 16b)."""
    seen = view(name, our_id)
    assert (seen.state, seen.reason, seen.restarts) == ("RUNNING", "None", 0)
    assert slurm_text.find_record(text(name), "7") is None


def test_words_in_a_name_are_no_fields() -> None:
    """JobName is `Restarts=7 PreemptTime=5`, and the Comment says the like."""
    assert view("22.05-no_requeue", "41023").restarts == 0
    assert view("22.05-no_requeue", "41023").preempt_ms is None


def test_words_in_a_wckey_are_no_fields() -> None:
    """A WCKey stands before the state, is the user's own text, and may hold blanks."""
    plain = text("24.11-preempted")
    changed = plain.replace("QOS=(null)", "QOS=(null) WCKey=*x Restarts=7 JobState=FAILED EndTime=5")
    assert changed != plain
    assert slurm_text.parse_job(changed, "51000", LOOKED_MS) == slurm_text.parse_job(plain, "51000", LOOKED_MS)


@pytest.mark.parametrize(("version", "array_id", "pending"), [("22.05", "41021", "2"), ("24.11", "51004", "2")])
def test_of_an_array_only_our_element_counts(version: str, array_id: str, pending: str) -> None:
    """`show job` of the array's id prints every element; ours is found by array id and index (field case 41)."""
    every = text(f"{version}-array")
    assert every.count("JobState=") > 1
    ours = slurm_text.parse_job(every, f"{array_id}_0", LOOKED_MS)
    assert isinstance(ours, JobView)
    assert ours.state == "RUNNING"
    assert ours == view(f"{version}-array_0", f"{array_id}_0")
    waiting = slurm_text.parse_job(every, f"{array_id}_{pending}", LOOKED_MS)
    assert isinstance(waiting, JobView)
    assert waiting.state == "PENDING"
    assert slurm_text.parse_job(every, f"{array_id}_7", LOOKED_MS) == NoView(
        f"scontrol printed no record of job {array_id}_7", definite=False
    )


@pytest.mark.parametrize(("version", "leader"), [("22.05", 41026), ("24.11", 51009)])
def test_of_a_hetjob_the_record_with_our_id_counts(version: str, leader: int) -> None:
    """`show job` of the leader prints every component (field case 42)."""
    both = text(f"{version}-hetjob")
    changed = both.replace(f"JobId={leader + 1} ", f"JobId={leader + 1} ", 1)
    first, second = changed.split(f"JobId={leader + 1} ")
    changed = first + f"JobId={leader + 1} " + second.replace("Restarts=0", "Restarts=5")
    for number, restarts in ((leader, 0), (leader + 1, 5)):
        seen = slurm_text.parse_job(changed, str(number), LOOKED_MS)
        assert isinstance(seen, JobView)
        assert seen.restarts == restarts


@pytest.mark.parametrize("key", ["JobState", "Reason", "Restarts", "Requeue", "BatchFlag", "EndTime"])
def test_a_record_without_a_needed_key_is_no_view(key: str) -> None:
    """What is not there is not guessed, and is worth another look."""
    torn = text("22.05-preempted").replace(f"{key}=", "Other=")
    seen = slurm_text.parse_job(torn, "41012", LOOKED_MS)
    assert isinstance(seen, NoView)
    assert not seen.definite


@pytest.mark.parametrize(
    ("value", "instant"),
    [("1795967271", 1_795_967_271_000), *((word, None) for word in ("Unknown", "None", "N/A", "(null)", "0", ""))],
)
def test_instants_are_epoch_seconds_or_nothing(value: str, instant: int | None) -> None:
    """SLURM_TIME_FORMAT=%s gives seconds; the words for nothing give None."""
    assert slurm_text.parse_instant_ms(value) == instant
    seen = slurm_text.parse_job(text("22.05-preempted").replace("EndTime=1795967271", f"EndTime={value}"), "41012", LOOKED_MS)
    assert isinstance(seen, JobView)
    assert seen.end_ms == instant


def test_a_client_that_prints_local_time_is_understood() -> None:
    """The ISO form is local time, as scontrol prints it when it ignores SLURM_TIME_FORMAT."""
    import datetime

    local = datetime.datetime.fromtimestamp(1_795_967_271)  # noqa: DTZ006 - local time is the point.
    assert slurm_text.parse_instant_ms(local.isoformat()) == 1_795_967_271_000


@pytest.mark.parametrize("value", ["soon", "17959x", "-5", "99999999999999999999", "2026-99-99T00:00:00", "\u0663"])
def test_an_odd_instant_is_no_view(value: str) -> None:
    """A time that cannot be read means that we could not look."""
    seen = slurm_text.parse_job(text("22.05-preempted").replace("EndTime=1795967271", f"EndTime={value}"), "41012", LOOKED_MS)
    assert isinstance(seen, NoView)
    assert not seen.definite


LINES = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from(
            [
                "   JobState=CANCELLED Reason=TimeLimit", "JobId=9 JobName=x", "JobId=41012 JobName=", "", "   ",
                "   Requeue=0 Restarts=9 BatchFlag=0", "   StartTime=1 EndTime=2", "   PreemptEligibleTime=1 PreemptTime=3",
                "Restarts=7 PreemptTime=5",
            ]
        ),
    ),
    max_size=6,
)  # fmt: skip


@given(LINES, LINES)
@settings(max_examples=300)
def test_whatever_a_user_names_a_job_the_view_is_the_same(name: list[str], comment: list[str]) -> None:
    """No JobName and no Comment changes what is read, unless it forges a whole record with its UserId line."""
    user_text = "\n".join([*name, *comment])
    assume("UserId=" not in user_text)
    plain = text("22.05-preempted")
    changed = plain.replace("JobName=t.sh", "JobName=" + "\n".join(name)).replace(
        "   StdErr=", "   Comment=" + "\n".join(comment) + " \n   StdErr="
    )
    assert slurm_text.parse_job(changed, "41012", LOOKED_MS) == slurm_text.parse_job(plain, "41012", LOOKED_MS)


NAMES = st.sampled_from(sorted(path.stem for path in TEXTS.iterdir()))


@given(NAMES, st.integers(0, 4000), st.integers(0, 200), st.text(max_size=20))
@settings(max_examples=300)
def test_a_damaged_answer_never_raises(name: str, at: int, length: int, insert: str) -> None:
    """Whatever is cut out or put in, the parsers give a value."""
    whole = text(name)
    torn = whole[:at] + insert + whole[at + length :]
    assert isinstance(slurm_text.parse_job(torn, "41012", LOOKED_MS), JobView | NoView)
    slurm_text.parse_config(torn)
    slurm_text.parse_partition_grace(torn)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_configuration_is_read(version: str) -> None:
    """KillWait in ms, the kind of process tracking, the version."""
    config = slurm_text.parse_config(text(f"{version}-config"))
    assert config.kill_wait_ms == 6_000
    assert config.proctrack == "linuxproc"
    assert config.version.startswith(version)
    assert config.requeue_exit == ()
    assert slurm_text.parse_config("RequeueExit             = 85,99\nRequeueExitHold = 7\n").requeue_exit == (85, 99)
    assert slurm_text.parse_config("").kill_wait_ms is None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_partition_tells_its_grace(version: str) -> None:
    """GraceTime of `show partition -o`, in ms; nothing where there is none."""
    assert slurm_text.parse_partition_grace(text(f"{version}-partition")) == 20_000
    assert slurm_text.parse_partition_grace("PartitionName=x OverGraceTime=5\n") is None


@pytest.mark.parametrize(
    ("rc", "stderr", "kind"),
    [
        (0, "", "accepted"),
        (1, "Job is pending execution for job 41012\n", "pending"),
        (1, "Requested operation is presently disabled for job 41011\n", "refused"),
        (1, "Only batch jobs are accepted or processed for job 41016\n", "refused"),
        (1, "Access/permission denied for job 41016\n", "unknown"),
        (1, "Unexpected message received for job 99999\n", "unknown"),
        (1, "Invalid job id specified for job 99999\n", "unknown"),
        (1, "Unable to contact slurm controller (connect failure) for job 5", "unknown"),
        (1, "Socket timed out on send/recv operation", "unknown"),
        (1, "", "unknown"),
        (-15, "", "unknown"),
        (-9, "Job is pending execution", "unknown"),
    ],
)
def test_only_two_refusals_of_a_requeue_are_definite(rc: int, stderr: str, kind: str) -> None:
    """ "Pending" is success; what is not known to be refused is unknown (docs/slurm.md, section 2)."""
    answer = slurm_text.classify_requeue(rc, "", stderr)
    assert answer.kind == kind
    assert answer.reason or kind == "accepted"
    assert "\n" not in answer.reason


def test_only_an_unknown_id_means_that_there_is_no_such_job() -> None:
    """A controller that does not answer has said nothing about the job."""
    assert slurm_text.no_such_job(1, "slurm_load_jobs error: Invalid job id specified\n")
    assert not slurm_text.no_such_job(1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")


STEP = {"SLURM_JOB_ID": "41005", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2"}


def who(**env: str) -> slurm.SlurmEnv:
    """Our identity in this environment."""
    seen = slurm.SlurmEnv.from_environ(env)
    assert seen is not None
    return seen


@pytest.mark.parametrize("env", [{}, {"SLURM_STEP_ID": "0"}, *({"SLURM_JOB_ID": word} for word in ("", "abc", "0"))])
def test_without_a_job_id_there_is_no_slurm(env: dict[str, str]) -> None:
    """Anything but a number is no job."""
    assert slurm.SlurmEnv.from_environ(env) is None


@pytest.mark.parametrize(
    ("value", "restarts"), [(None, 0), ("", 0), ("0", 0), ("abc", 0), ("-1", 0), ("1.5", 0), ("3", 3), ("\u0663", 0)]
)
def test_whatever_is_no_number_of_restarts_is_none(value: str | None, restarts: int) -> None:
    """SLURM_RESTART_COUNT is unset on the first run (field case 54)."""
    assert who(**STEP, **({} if value is None else {"SLURM_RESTART_COUNT": value})).restarts == restarts


def test_a_step_knows_its_place() -> None:
    """Under srun the task's number and the step's size count, not the job's."""
    seen = who(**STEP, SLURM_NODEID="1", SLURMD_NODENAME="n2", SLURM_CLUSTER_NAME="c")
    assert (seen.under_srun, seen.step_id, seen.procid, seen.ntasks) == (True, "0", 1, 2)
    assert (seen.nodeid, seen.nodename, seen.cluster, seen.requeue_id) == (1, "n2", "c", "41005")


@pytest.mark.parametrize("step", [None, "", "abc", "4294967291", "4294967290"])
def test_in_a_batch_script_we_are_alone_and_not_under_srun(step: str | None) -> None:
    """SLURM_PROCID and SLURM_NTASKS are set there too, and speak of the job (docs/slurm.md, section 4)."""
    env = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", **({} if step is None else {"SLURM_STEP_ID": step})}
    seen = who(**env)
    assert (seen.under_srun, seen.step_id, seen.procid, seen.ntasks) == (False, "batch", 0, 1)


def test_the_size_of_a_step_may_come_from_either_variable() -> None:
    """24.11 leaves SLURM_NTASKS out of `srun --het-group=1`; others may leave out SLURM_STEP_NUM_TASKS."""
    assert who(SLURM_JOB_ID="5", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="3").ntasks == 3
    assert who(SLURM_JOB_ID="5", SLURM_STEP_ID="0", SLURM_NTASKS="3").ntasks == 3
    assert who(SLURM_JOB_ID="5", SLURM_STEP_ID="0").ntasks == 1


def test_an_array_element_goes_by_array_and_index() -> None:
    """The last element's SLURM_JOB_ID is the array's own id, and requeues all (field case 41)."""
    seen = who(SLURM_JOB_ID="100", SLURM_ARRAY_JOB_ID="100", SLURM_ARRAY_TASK_ID="3")
    assert seen.requeue_id == "100_3"
    assert who(SLURM_JOB_ID="101", SLURM_ARRAY_JOB_ID="100", SLURM_ARRAY_TASK_ID="0").requeue_id == "100_0"


def test_a_hetjob_goes_by_its_leader() -> None:
    """SLURM_JOB_ID is the leader's in every component; where it is the component's, the leader is still known (field case 42)."""
    env = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "41003", "SLURM_JOB_ID_HET_GROUP_1": "41004"}
    assert who(SLURM_JOB_ID="41003", **env).requeue_id == "41003"
    assert who(SLURM_JOB_ID="41004", **env).requeue_id == "41003"


def test_scontrol_is_found_once_as_an_absolute_path(tmp_path: Path) -> None:
    """A PATH with relative parts gives an absolute path; a PATH without scontrol gives None (field case 43)."""
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    relative = os.path.relpath(tool.parent)
    found = slurm.locate(f"/nowhere:{relative}")
    assert found is not None
    assert Path(found).is_absolute()
    assert Path(found).samefile(tool)
    assert slurm.locate(str(tmp_path)) is None
    tool.chmod(0o644)
    assert slurm.locate(str(tool.parent)) is None
    assert slurm.Scontrol.locate(who(SLURM_JOB_ID="5"), {"PATH": str(tmp_path)}) is None


def test_the_recorded_answers_are_whole() -> None:
    """Every recorded job text holds a record that ends as scontrol ends it, so that the tests above test something."""
    for path in TEXTS.iterdir():
        if not re.search(r"config|partition", path.name):
            assert path.read_text().startswith("JobId=")
            assert path.read_text().endswith("\n\n")
