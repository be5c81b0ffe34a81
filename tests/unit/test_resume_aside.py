"""A checkpoint that training fails from again and again is set aside, with why, and comes back where nothing else is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.config import read_options
from ckpt_supervisor.start.resume_gate import Resume, choose
from ckpt_supervisor.store import failed
from ckpt_supervisor.store.layout import keep_name

from tests.support.ctl_stage import caller, committed, flip_a_bit, leave, names

JOB = "77"
BACK = "ckptctl repair --restore 200 gives it its name back, once training can load it"


def fails(root: Path, step: int, times: int = 3, reason: str = "UnpicklingError: weights only") -> None:
    """So many starts of this job that fail while they load this step, each with an epoch and a journal of its own."""
    for _ in range(times):
        epoch = store.take_epoch(root, JOB, 2, "0").epoch
        leave(root)
        lines: list[dict[str, Any]] = [
            {"event": "command_started", "mono_ms": 0, "resume_step": step},
            {"event": "rank_hello", "mono_ms": 100, "rank": 0},
            {"event": "rank_failed", "mono_ms": 200, "rank": 0, "reason": reason, "step": step},
            {"event": "command_exited", "mono_ms": 300, "code": 1},
            {"event": "exit", "mono_ms": 301, "code": 1},
        ]
        (root / "journal").mkdir(exist_ok=True)
        path = root / "journal" / f"{JOB}-2-0-{epoch}-0.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def starts(root: Path, *options: str, command: tuple[str, ...] = ("t",)) -> Resume:
    """What a start of this job resumes from."""
    epoch = store.take_epoch(root, JOB, 2, "0").epoch
    try:
        return choose(read_options(["--dir", str(root), *options, "--", *command], {}), JOB, epoch, None)
    finally:
        leave(root)


def aside(root: Path) -> list[int]:
    """Steps that are set aside, newest first."""
    return [one.step for one in store.all_set_aside(root)]


def test_after_three_failures_it_is_renamed_with_why_and_latest_leads_to_the_one_before(tmp_path: Path) -> None:
    """Row 3: not deleted, whole under its other name, and the record says which starts failed and what the rank said."""
    committed(tmp_path, 100)
    committed(tmp_path, 200)
    fails(tmp_path, 200, times=2)
    assert starts(tmp_path).step == 200
    assert aside(tmp_path) == []
    fails(tmp_path, 200, times=1)
    resume = starts(tmp_path)
    assert resume.step == 100
    (line,) = resume.lines
    name = store.failed_name(200, 2, 0)
    assert line.startswith("passed over step-000000200: training has failed 3 times in a row right after resuming from it")
    assert "weights only" in line
    assert f"is set aside as {name}, and ckptctl repair --restore 200 gives it its name back" in line
    assert names(tmp_path) == [name, f"{name}.json", "latest", "step-000000100"]
    assert (tmp_path / "latest").readlink() == Path("step-000000100")
    assert store.verify_checkpoint(tmp_path / name).verdict is store.Verdict.INTACT
    (one,) = store.all_set_aside(tmp_path)
    assert one.why is not None
    assert [start.reason for start in one.why.starts] == ["UnpicklingError: weights only"] * 3
    assert [start.epoch for start in one.why.starts] == [6, 4, 3]
    assert "training has failed 3 times" in one.why.text
    again = starts(tmp_path)
    assert (again.step, again.lines) == (100, ()), "said once; the next start has nothing to pass over"
    assert again.warnings[-1:] == (f"step 200 is still set aside, as training fails from it ({name}); {BACK}",)
    assert resume.warnings == (), "its own line says it already"


def test_a_rank_that_was_killed_after_steps_of_its_own_takes_nothing_from_the_checkpoint(tmp_path: Path) -> None:
    """SIGKILL, as for lack of memory, leaves no last word: where it had come to is in the journal's progress lines."""
    committed(tmp_path, 100)
    committed(tmp_path, 200)
    for number in range(3):
        fails(tmp_path, 200, times=1)
        path = max((tmp_path / "journal").iterdir(), key=lambda one: int(one.stem.split("-")[3]))
        lines = [line for line in path.read_text().splitlines() if "rank_failed" not in line]
        path.write_text(
            "\n".join([*lines[:2], json.dumps({"event": "progress", "mono_ms": 250, "step": 201 + number}), *lines[2:], ""])
        )
    assert starts(tmp_path).step == 200
    assert aside(tmp_path) == []


def test_a_long_reason_is_cut_in_the_line_and_whole_lines_stay_lines(tmp_path: Path) -> None:
    """torch names every tensor whose size does not fit, each on a line of its own; the record has more of it."""
    committed(tmp_path, 100)
    committed(tmp_path, 200)
    text = "RuntimeError: Error(s) in loading state_dict:\n\t" + "size mismatch for layer.weight: copying a param\n" * 20
    fails(tmp_path, 200, reason=text)
    (line,) = starts(tmp_path).lines
    assert "RuntimeError: Error(s) in loading state_dict: size mismatch" in line
    assert "\n" not in line
    assert len(line) < 560
    (one,) = store.all_set_aside(tmp_path)
    assert one.why is not None
    assert len(one.why.starts[0].reason) > 300


def test_the_only_intact_one_keeps_its_name_and_is_tried_again(tmp_path: Path) -> None:
    """A damaged one beside it is nothing to fall back to."""
    flip_a_bit(committed(tmp_path, 100) / "state.pt")
    committed(tmp_path, 200)
    fails(tmp_path, 200, times=6)
    resume = starts(tmp_path)
    assert resume.step == 200
    assert "with no other intact one to fall back to it is tried again" in resume.lines[0]
    assert aside(tmp_path) == []


def test_when_training_fails_from_all_of_them_they_have_their_names_back_and_the_newest_is_tried(tmp_path: Path) -> None:
    """One back at a time; then it is not the checkpoints' fault, and nothing is lost."""
    for step in (100, 200, 300):
        committed(tmp_path, step)
    for step, left in ((300, [300]), (200, [300, 200])):
        fails(tmp_path, step)
        assert starts(tmp_path).step < step
        assert aside(tmp_path) == left
    fails(tmp_path, 100)
    resume = starts(tmp_path)
    assert resume.step == 300
    assert aside(tmp_path) == []
    assert any("step-000000300, set aside earlier, has its name back" in line for line in resume.lines)
    fails(tmp_path, 300, times=2)
    assert starts(tmp_path).step == 300, "failures from before it was set aside do not count a second time"
    fails(tmp_path, 300, times=1)
    assert starts(tmp_path).step == 200


def test_one_that_is_set_aside_is_used_when_the_others_turn_out_to_be_damaged(tmp_path: Path) -> None:
    """Never a start from zero, nor a refusal, while something whole is there."""
    older = committed(tmp_path, 100)
    committed(tmp_path, 200)
    fails(tmp_path, 200)
    assert starts(tmp_path).step == 100
    flip_a_bit(older / "state.pt")
    resume = starts(tmp_path)
    assert (resume.step, resume.refusal) == (200, "")
    assert "step-000000200, set aside earlier, has its name back" in resume.lines[0]


def test_what_a_person_protects_or_asked_for_keeps_its_name(tmp_path: Path) -> None:
    """A mark, a milestone, and the command's own value: passed over as before, or taken, and never renamed."""
    committed(tmp_path, 100, job="55")
    newer = committed(tmp_path, 200, job="55")
    fails(tmp_path, 200)
    resume = starts(tmp_path, "--resume-arg=--from", command=("t", "--from", str(newer)))
    assert (resume.step, aside(tmp_path)) == (200, [])
    resume = starts(tmp_path, "--keep-every", "200")
    assert resume.step == 100
    assert "it is a milestone and is left as it is; --resume-tries 0 has it tried again" in resume.lines[0]
    store.set_kept(tmp_path, 200, on=True)
    resume = starts(tmp_path)
    assert (resume.step, aside(tmp_path)) == (100, [])
    assert "it is protected and is left as it is" in resume.lines[0]
    assert starts(tmp_path, "--resume-tries", "0").step == 200
    store.set_kept(tmp_path, 200, on=False)
    assert starts(tmp_path).step == 100
    assert aside(tmp_path) == [200]


def test_a_start_that_lost_the_directory_renames_nothing(tmp_path: Path) -> None:
    """An old coordinator must not take away what the new one resumes from."""
    committed(tmp_path, 100)
    committed(tmp_path, 200)
    fails(tmp_path, 200)
    epoch = store.take_epoch(tmp_path, JOB, 2, "0").epoch
    store.take_epoch(tmp_path, JOB, 3, "0")
    resume = choose(read_options(["--dir", str(tmp_path), "--", "t"], {}), JOB, epoch, None)
    assert (resume.step, aside(tmp_path)) == (100, [])
    assert "belongs to another run now" in resume.lines[0]


def test_a_step_that_is_committed_anew_has_a_record_of_its_own(tmp_path: Path) -> None:
    """The new one fails as well: both are aside under different names, and the newest is the one to restore."""
    committed(tmp_path, 100)
    committed(tmp_path, 200)
    fails(tmp_path, 200)
    starts(tmp_path)
    committed(tmp_path, 200)
    assert starts(tmp_path).step == 200
    fails(tmp_path, 200)
    assert starts(tmp_path).step == 100
    assert aside(tmp_path) == [200, 200]
    assert len({one.path for one in store.all_set_aside(tmp_path)}) == 2


# --- by hand -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


def with_one_aside(root: Path) -> Path:
    """100 stands, 200 is set aside."""
    committed(root, 100)
    committed(root, 200)
    fails(root, 200)
    starts(root)
    return root / store.failed_name(200, 2, 0)


def test_ls_all_shows_it_with_the_way_back_and_verify_reads_it(call: Any, tmp_path: Path) -> None:
    """Not among the checkpoints, counted below them; its record is no rubbish."""
    path = with_one_aside(tmp_path)
    told = call("ls", "--dir", tmp_path)
    assert told.lines[-2].endswith("(1 set aside as training fails from it: see --all)")
    shown = call("ls", "--all", "--dir", tmp_path)
    assert "set aside" in shown.lines[1]
    assert "back by: ckptctl repair --restore 200" in shown.lines[1]
    record = call("ls", "--all", "--dir", tmp_path, "--json").values[0]
    assert (record["step"], record["kind"], record["verdict"]) == (200, "failed", None)
    assert call("verify", path, "--dir", tmp_path).code == 0
    assert "ckptctl repair --restore 200" in call("show", path, "--dir", tmp_path).out
    repaired = call("repair", "--dir", tmp_path)
    said = f"{path.name}: left: set aside, as training failed from it; back by: ckptctl repair --restore 200"
    assert (repaired.code, repaired.lines) == (0, [said, "nothing to repair; 1 of 1 checkpoint intact, every byte read"])
    assert path.is_dir()


def test_restore_gives_it_its_name_back_and_it_has_all_its_tries_again(call: Any, tmp_path: Path) -> None:
    """So does plain mv: what counts is the record, which stays beside it."""
    path = with_one_aside(tmp_path)
    planned = call("repair", "--restore", "200", "--dry-run", "--dir", tmp_path)
    assert (planned.code, path.is_dir()) == (0, True)
    assert planned.lines[0].startswith(f"{path.name}: would be renamed to step-000000200: training has failed 3 times")
    told = call("repair", "--restore", "step-000000200", "--dir", tmp_path)
    assert told.code == 0
    assert (tmp_path / "latest").readlink() == Path("step-000000200")
    assert starts(tmp_path).step == 200
    fails(tmp_path, 200, times=2)
    assert starts(tmp_path).step == 200
    fails(tmp_path, 200, times=1)
    assert starts(tmp_path).step == 100
    assert call("repair", "--restore", "300", "--dir", tmp_path).code == 1
    assert call("repair", "--restore", "200", "--dir", tmp_path).code == 0


def test_restore_of_a_damaged_one_says_that_it_is_damaged(call: Any, tmp_path: Path) -> None:
    """It is there, and `ls --all` shows it: "no such checkpoint" would be no answer."""
    flip_a_bit(committed(tmp_path, 674) / "state.pt")
    committed(tmp_path, 700)
    assert call("repair", "--dir", tmp_path).code == 0
    told = call("repair", "--restore", "674", "--dir", tmp_path)
    assert told.code == 1
    name = store.damaged_name(674, 1, 0)
    assert told.err.startswith(f"ckptctl: step 674 was put aside as damaged ({name}) and cannot be restored")
    assert "ckptctl verify" in told.err


def test_restore_refuses_what_is_damaged_or_in_the_way_or_held(call: Any, tmp_path: Path) -> None:
    """It is read in full first; another one of its step is not replaced; and nothing is changed under a live holder."""
    path = with_one_aside(tmp_path)
    flip_a_bit(path / "state.pt")
    told = call("repair", "--restore", "200", "--dir", tmp_path)
    assert (told.code, path.is_dir()) == (1, True)
    assert "left: corrupt" in told.lines[0]
    flip_a_bit(path / "state.pt")
    committed(tmp_path, 200)
    told = call("repair", "--restore", "200", "--dir", tmp_path)
    assert (told.code, path.is_dir()) == (1, True)
    assert "there is another step-000000200" in told.err
    store.take_epoch(tmp_path, JOB, 9, "0")
    assert call("repair", "--restore", "200", "--dir", tmp_path).code == 1


# --- how it goes in the end ----------------------------------------------------------------------------------------------


def test_it_goes_when_as_many_later_ones_were_committed_since_as_keep_asks_for(tmp_path: Path) -> None:
    """Then it would be pruned under its own name as well. Ones below it, and older ones above it, say nothing."""
    path = with_one_aside(tmp_path)
    for step in (120, 150, 190, 210, 220):
        committed(tmp_path, step)
    assert failed.clear_past(tmp_path, 3, store.scan(tmp_path)) == store.Removed((), ())
    (tmp_path / keep_name(200)).touch()
    committed(tmp_path, 230)
    assert failed.clear_past(tmp_path, 3, store.scan(tmp_path)).names == ()
    (tmp_path / keep_name(200)).unlink()
    assert failed.clear_past(tmp_path, 3, store.scan(tmp_path)).names == (path.name,)
    assert [name for name in names(tmp_path) if "failed" in name or "trash" in name] == []


def test_steps_above_it_of_a_run_before_do_not_count_as_got_past(tmp_path: Path) -> None:
    """They were there, and unusable, when it was set aside: whoever goes back does not lose it for them."""
    later = (300, 310, 320)
    for step in later:
        committed(tmp_path, step).rename(tmp_path / f"away-{step}")
    with_one_aside(tmp_path)
    (one,) = store.all_set_aside(tmp_path)
    for step in later:
        (tmp_path / f"away-{step}").rename(tmp_path / store.step_name(step))
    assert failed.clear_past(tmp_path, 3, store.scan(tmp_path)).names == ()
    assert one.path.is_dir()


def test_a_record_stays_as_long_as_there_is_a_checkpoint_of_its_step(tmp_path: Path) -> None:
    """It says which failures are answered for; without one of either name it is rubbish."""
    path = with_one_aside(tmp_path)
    record = tmp_path / f"{path.name}.json"
    path.rename(tmp_path / "step-000000200")
    failed.clear_past(tmp_path, 3, store.scan(tmp_path))
    assert record.is_file()
    (tmp_path / "step-000000200").rename(tmp_path / "elsewhere")
    failed.clear_past(tmp_path, 3, store.scan(tmp_path))
    assert not record.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 70_000, b'{"format": 2}', b"[" * 60_000])
def test_a_record_that_cannot_be_read_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    """It costs no start, and the checkpoint stays what it is."""
    path = with_one_aside(tmp_path)
    (tmp_path / f"{path.name}.json").write_bytes(content)
    (one,) = store.all_set_aside(tmp_path)
    assert one.why is None
    assert store.answered_for(tmp_path) == {}
    assert starts(tmp_path).step == 100
