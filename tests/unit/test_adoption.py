"""What is remembered of a program's own files between looks: when one is taken, tried again, left, or put aside."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.config import read_options
from ckpt_supervisor.directory.adoption import AGAIN_LOOKS, Adoption
from ckpt_supervisor.start import resume_gate
from ckpt_supervisor.start.startup import Job

from tests.support.checkpoint_files import some_state, torch_file

JOB = Job("77", 0, "0", 0, None)


class Stage:
    """A checkpoint directory that a program writes into, and looks at it."""

    def __init__(self, root: Path, patterns: str = "step_*.pt", *options: str) -> None:
        self.root = root
        self.epoch = store.take_epoch(root, JOB.name, JOB.attempt, JOB.step_id).epoch
        self.said: list[str] = []
        words = ["--dir", str(root), "--adopt", patterns, *options, "--", "t"]
        self.adoption = Adoption(read_options(words, {}), JOB, self.epoch, self.said.append)

    def write(self, step: int, data: bytes | None = None) -> Path:
        """What the program writes for this step."""
        path = self.root / f"step_{step:06d}.pt"
        path.write_bytes(torch_file(some_state(step)) if data is None else data)
        return path

    def adopt(self, step: int) -> None:
        """It is a checkpoint, after two looks."""
        self.write(step)
        self.adoption.look(final=False)
        assert self.adoption.look(final=False).steps == (step,)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint."""
        return sorted(candidate.step for candidate in store.scan(self.root) if candidate.problem is None)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """The usual one."""
    return Stage(tmp_path)


def test_a_step_that_was_written_once_more_at_the_signal_counts_as_that_signals(stage: Stage) -> None:
    """The handler saves the step of the last periodic save, which has been adopted meanwhile."""
    stage.adopt(100)
    stage.adoption.mark()
    assert stage.adoption.look(final=True).again == -1, "it has written nothing since"
    stage.write(100)
    found = stage.adoption.look(final=True)
    assert (found.steps, found.again, found.problem) == ((100,), 100, "")


def test_a_step_that_was_written_again_before_the_signal_is_no_answer_to_it(stage: Stage) -> None:
    """Only what has changed since the mark is."""
    stage.adopt(100)
    stage.write(100)
    stage.adoption.mark()
    assert stage.adoption.look(final=True).again == -1


def test_a_damaged_newer_one_is_not_covered_by_an_older_one_that_was_written_again(stage: Stage) -> None:
    """What the program meant last is what is asked about."""
    stage.adopt(100)
    stage.adoption.mark()
    stage.write(100)
    stage.write(101, torch_file(some_state(1))[:100])
    found = stage.adoption.look(final=True)
    assert found.again == -1
    assert found.problem.startswith("step_000101.pt: ")


def test_a_mark_that_is_taken_too_late_is_forgotten_all_the_same(stage: Stage) -> None:
    """Slurm had sent the signal to everybody, so the program may have saved before it; the mark ends after that is known."""
    stage.adopt(100)
    stage.write(101)
    stage.adoption.forget_mark()
    stage.adoption.mark()
    found = stage.adoption.look(final=True)
    assert (found.steps, found.fresh) == ((101,), True)


def test_damaged_ones_in_front_do_not_hide_a_whole_one_behind_them(tmp_path: Path) -> None:
    """However few are kept: a start from zero beside a good file would go unnoticed for days."""
    stage = Stage(tmp_path, "step_*.pt", "--keep", "1")
    for step in (10, 20):
        stage.write(step)
    for step in (30, 40):
        stage.write(step, torch_file(some_state(step))[:-30])
    found = stage.adoption.first_look()
    assert (found.steps, stage.steps()) == ((20,), [20])
    assert sorted(path.name for path in tmp_path.glob(".damaged-*")) == [".damaged-step_000030.pt", ".damaged-step_000040.pt"]


def test_in_a_hurry_the_newest_one_is_enough(stage: Stage) -> None:
    """Its copy is what the way out waits for; nobody needs the older ones now."""
    for step in (10, 20, 30):
        stage.write(step)
    assert stage.adoption.look(final=True, hurries=lambda: True).steps == (30,)
    assert stage.steps() == [30]


def test_what_cannot_be_written_is_told_once_and_not_copied_again_at_every_look(stage: Stage) -> None:
    """Each try would fill the disk that training saves to. Some looks later, and at the last one, it is tried again."""
    stage.write(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # A write fails with EFBIG, as with ENOSPC on a full disk.
    try:
        for _ in range(AGAIN_LOOKS):
            stage.adoption.look(final=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(stage.root.glob(".partial-*")), "what was copied so far goes at once"
    copies = [line for line in stage.said if line.endswith("checking and keeping it")]
    assert len(copies) <= 2
    assert sum("could not be kept as a checkpoint: File too large" in line for line in stage.said) == 1
    assert stage.adoption.look(final=True).steps == (10,)


def test_one_who_was_fenced_off_copies_nothing(stage: Stage) -> None:
    """After a node failure the old attempt may live on: its copies would all be refused at their commit."""
    stage.write(10)
    store.take_epoch(stage.root, JOB.name, JOB.attempt + 1, JOB.step_id)
    found = stage.adoption.look(final=True)
    assert found.steps == ()
    assert found.problem.startswith("step_000010.pt: another run owns the directory now (job 77")
    assert len(stage.said) == 1
    stage.adoption.look(final=True)
    assert len(stage.said) == 1, "told once"


def test_a_file_that_goes_with_every_step_is_not_put_aside_with_a_damaged_one(tmp_path: Path) -> None:
    """Without its tracker Megatron takes the directory for a new one, and begins at step 0 without a word."""
    stage = Stage(tmp_path, "step_*.pt,newest.txt")
    (tmp_path / "newest.txt").write_text("20")
    stage.write(20, torch_file(some_state(20))[:-30])
    found = stage.adoption.first_look()
    assert len(found.lines) == 1
    assert (tmp_path / ".damaged-step_000020.pt").exists()
    assert (tmp_path / "newest.txt").read_text() == "20"


def trainer(root: Path, step: int, *names: str) -> Path:
    """A directory with these files."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(torch_file(some_state(step)))
    return folder


def test_a_save_that_lacks_a_file_is_refused_until_the_next_one_lacks_it_too(tmp_path: Path) -> None:
    """Field case 69: cut short it lacks something once. A program that has stopped to write a file goes on without it."""
    stage = Stage(tmp_path, "checkpoint-*")
    trainer(tmp_path, 100, "model.bin", "extra.pt", "events.node7")
    assert stage.adoption.look(final=True).steps == (100,)
    trainer(tmp_path, 200, "model.bin")
    assert "lacks checkpoint-#/extra.pt" in stage.adoption.look(final=True).problem
    assert Stage(tmp_path, "checkpoint-*").adoption.first_look().lines == (), "nothing says that what is there is damaged"
    assert (tmp_path / "checkpoint-200").exists()
    trainer(tmp_path, 300, "model.bin")
    assert Stage(tmp_path, "checkpoint-*").adoption.look(final=True).steps[-1] == 300


def test_a_log_that_only_one_save_held_is_no_part_of_the_state(tmp_path: Path) -> None:
    """Trackers write files named after the host, and people put notes there."""
    stage = Stage(tmp_path, "checkpoint-*")
    trainer(tmp_path, 100, "model.bin", "events.out.nodeA", "best.txt")
    assert stage.adoption.look(final=True).steps == (100,)
    trainer(tmp_path, 200, "model.bin", "events.out.nodeB")
    assert stage.adoption.look(final=True).steps == (200,)


def test_a_save_that_paused_for_long_is_taken_once_more_when_it_is_whole(tmp_path: Path) -> None:
    """Two looks saw half of it unchanged: the copy of that half is given up for the whole."""
    stage = Stage(tmp_path, "checkpoint-*")
    trainer(tmp_path, 100, "model.bin")
    stage.adoption.look(final=False)
    assert stage.adoption.look(final=False).steps == (100,)
    (tmp_path / "checkpoint-100" / "optimizer.bin").write_bytes(torch_file(some_state(1)))
    assert stage.adoption.look(final=True).steps == (100,)
    manifest = store.read_manifest(tmp_path / store.step_name(100))
    assert [file.path for file in manifest.files] == ["checkpoint-100/model.bin", "checkpoint-100/optimizer.bin"]
    assert not [name for name in store.list_names(tmp_path) if name.startswith((".trash", ".partial", ".damaged"))]
    (tmp_path / "checkpoint-100" / "extra.bin").write_bytes(torch_file(some_state(2)))
    assert Stage(tmp_path, "checkpoint-*").adoption.first_look().steps == (100,), "the next start sees it, too"


def test_a_directory_that_is_being_deleted_does_not_take_its_copy_with_it(tmp_path: Path) -> None:
    """The program's own rotation: what has lost files is no newer state."""
    stage = Stage(tmp_path, "checkpoint-*")
    trainer(tmp_path, 100, "model.bin", "optimizer.bin")
    assert stage.adoption.look(final=True).steps == (100,)
    (tmp_path / "checkpoint-100" / "optimizer.bin").unlink()
    assert stage.adoption.look(final=True).steps == ()
    assert stage.steps() == [100]


def test_training_that_goes_on_from_an_older_step_is_kept_below_newer_checkpoints(stage: Stage) -> None:
    """Field case 99: another job's step 30 stands; what this one writes after an explicit older start is new all the same."""
    for step in (10, 20, 30):
        stage.adopt(step)
    again = Stage(stage.root)
    assert again.adoption.first_look().steps == ()
    again.write(15)
    again.adoption.look(final=False)
    assert again.adoption.look(final=False).steps == (15,)
    assert again.adoption.look(final=True).steps == ()


def test_what_keep_has_let_go_does_not_come_back(stage: Stage) -> None:
    """The program keeps all of its files, we the newest ones."""
    for step in (10, 20, 30):
        stage.adopt(step)
    for candidate in store.scan(stage.root):
        if candidate.step < 30:
            store.remove(candidate)
    assert stage.adoption.look(final=True).steps == ()
    again = Stage(stage.root)
    assert again.adoption.first_look().steps == again.adoption.look(final=True).steps == ()


def test_what_somebody_still_writes_at_a_start_is_left_where_it_is(tmp_path: Path) -> None:
    """After a node failure the program of the attempt before may live, and write."""
    stage = Stage(tmp_path)
    path = stage.write(10, torch_file(some_state(1))[:500])
    done = threading.Event()

    def write() -> None:
        while not done.wait(0.01):
            with path.open("ab") as file:
                file.write(b"more")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        (line,) = stage.adoption.first_look().lines
    finally:
        done.set()
        writer.join()
    assert "still being written" in line
    assert path.exists()


def test_nothing_but_damaged_files_of_the_programs_own_is_no_start_from_zero(tmp_path: Path) -> None:
    """Field cases 67 and 82: they are put aside, and the start is refused with their names, this time and the next."""
    for step in (10, 20):
        Stage(tmp_path).write(step, torch_file(some_state(step))[:500])
    stage = Stage(tmp_path)
    assert len(stage.adoption.first_look().lines) == 2
    words = ["--dir", str(tmp_path), "--adopt", "step_*.pt"]
    for _ in range(2):
        resume = resume_gate.choose(read_options([*words, "--", "t"], {}), JOB.name, stage.epoch, None)
        assert "holds 2 checkpoints and none is intact" in resume.refusal
    options = read_options([*words, "--allow-restart-from-scratch", "--", "t"], {})
    assert resume_gate.choose(options, JOB.name, stage.epoch, None).refusal == ""


def test_a_link_to_a_good_one_is_not_taken_and_not_put_aside(tmp_path: Path) -> None:
    """What it shows may change, so it is no checkpoint; but nothing says that it is damaged."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = trainer(elsewhere, 100, "model.bin")
    root = tmp_path / "ckpt"
    root.mkdir()
    stage = Stage(root, "checkpoint-*")
    (root / "checkpoint-100").symlink_to(folder)
    assert stage.adoption.first_look().lines == ()
    assert (root / "checkpoint-100").is_symlink()
    assert stage.steps() == []
