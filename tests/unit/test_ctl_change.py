"""ckptctl keep and prune: what stays, what goes, and when nothing may be touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.store.layout import claim_name

from tests.support.ctl_stage import caller, committed, flip_a_bit, leave, names

ELSEWHERE = "another-node"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


def steps(root: Path) -> list[int]:
    """The committed steps."""
    return sorted(step for step in map(store.parse_step, os.listdir(root)) if step is not None)  # noqa: PTH208 - names only


def four(root: Path) -> None:
    """Steps 10, 20, 30 and 40."""
    for step in (10, 20, 30, 40):
        committed(root, step)


def actions(told: Any) -> dict[int, str]:
    """What --json says of each step."""
    return {value["step"]: value["action"] for value in told.values}


def test_keep_protects_from_prune_until_it_is_released(call: Any, tmp_path: Path) -> None:
    """By number, name or path; twice is as good as once; `ls` shows it and prune goes around it."""
    four(tmp_path)
    told = call("keep", "10", "--dir", tmp_path)
    assert (told.code, told.out) == (0, "step 10 is protected from being pruned; ckptctl keep 10 --release takes that back\n")
    for words in (["step-000000010", "--dir", tmp_path], [tmp_path / "step-000000010"]):
        told = call("keep", *words)
        assert (told.code, told.out) == (0, "step 10 is protected from being pruned (as it was before)\n")
    assert call("ls", "--dir", tmp_path, "--json").values[-1]["protected"] is True
    assert call("prune", "--keep", "1", "--dir", tmp_path).code == 0
    assert steps(tmp_path) == [10, 40]
    told = call("keep", "10", "--release", "--dir", tmp_path)
    assert (told.code, told.out) == (0, "step 10 is released: it goes when its turn comes\n")
    assert call("keep", "10", "--release", "--dir", tmp_path).out == "step 10 was not protected\n"
    call("prune", "--keep", "1", "--dir", tmp_path)
    assert steps(tmp_path) == [40]
    told = call("keep", "40", "--dir", tmp_path, "--json")
    assert told.values == [{"step": 40, "path": str(tmp_path / "step-000000040"), "protected": True, "changed": True}]
    assert call("keep", "40", "--dir", tmp_path, "--json").values[0]["changed"] is False


def test_keep_refuses_what_is_not_there_or_not_intact(call: Any, tmp_path: Path) -> None:
    """1 and the reason, and no mark is left that would later protect another checkpoint of that step."""
    path = committed(tmp_path, 10)
    for words in (["11", "--dir", tmp_path], ["11", "--release", "--dir", tmp_path], [tmp_path / "step-000000011"]):
        told = call("keep", *words)
        assert (told.code, told.out, told.err) == (1, "", f"ckptctl: no checkpoint of step 11 in {tmp_path}\n")
    (path / "state.pt").write_bytes(b"short")
    told = call("keep", "10", "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert "step 10 is not protected, since it is not intact: state.pt at byte 5: truncated" in told.err
    assert call("keep", "10", "--dir", tmp_path / "none").code == 1
    assert store.kept_steps(tmp_path) == frozenset()


def test_a_mark_whose_checkpoint_is_gone_can_be_released(call: Any, tmp_path: Path) -> None:
    """Somebody removed the directory by hand."""
    committed(tmp_path, 10)
    call("keep", "10", "--dir", tmp_path)
    (tmp_path / "step-000000010").rename(tmp_path / "elsewhere")
    assert call("keep", "10", "--release", "--dir", tmp_path).code == 0
    assert store.kept_steps(tmp_path) == frozenset()


def test_prune_dry_run_says_what_would_go_and_why_the_others_stay(call: Any, tmp_path: Path) -> None:
    """Nothing is changed, and nothing has to be read."""
    four(tmp_path)
    committed(tmp_path, 50, "structure")
    (committed(tmp_path, 60) / "state.pt").unlink()
    call("keep", "20", "--dir", tmp_path)
    before = names(tmp_path)
    told = call("prune", "--dry-run", "--keep", "1", "--keep-every", "30", "--dir", tmp_path)
    assert told.code == 0
    assert [line.split(None, 4) for line in told.lines[:6]] == [
        ["stays", "60", "1.5", "kB", "not intact: never pruned, and does not count"],
        ["stays", "50", "1.5", "kB", "the newest intact one"],
        ["stays", "40", "1.5", "kB", "within --keep 1"],
        ["stays", "30", "1.5", "kB", "a milestone: every 30 steps"],
        ["stays", "20", "1.5", "kB", "protected by ckptctl keep"],
        ["would", "go", "10", "1.5", "kB"],
    ]
    assert told.lines[6] == "1 checkpoint, 1.5 kB, would go"
    assert names(tmp_path) == before
    values = call("prune", "--dry-run", "--keep", "1", "--dir", tmp_path, "--json").values
    assert [value["action"] for value in values] == ["stays", "stays", "stays", "would go", "stays", "would go"]
    assert list(values[0]) == ["step", "path", "action", "reason", "bytes"]


def test_prune_keeps_by_bytes_and_not_by_names(call: Any, tmp_path: Path) -> None:
    """Field case 88: a flipped bit in the newest one is found before anything goes, and that one does not count."""
    four(tmp_path)
    flip_a_bit(tmp_path / "step-000000040" / "state.pt")
    told = call("prune", "--keep", "1", "--dir", tmp_path)
    assert told.code == 0
    assert "passed over step-000000040: corrupt: state.pt" in told.err
    assert steps(tmp_path) == [30, 40]
    assert store.newest_intact(tmp_path).chosen is not None


def test_prune_removes_nothing_when_none_is_intact(call: Any, tmp_path: Path) -> None:
    """All damaged: 1, the reason, and every directory is where it was."""
    four(tmp_path)
    for step in steps(tmp_path):
        flip_a_bit(tmp_path / store.step_name(step) / "state.pt")
    before = names(tmp_path)
    told = call("prune", "--keep", "1", "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert told.err.splitlines()[-1] == f"ckptctl: nothing was pruned: no intact checkpoint in {tmp_path}"
    assert names(tmp_path) == before


@pytest.mark.parametrize("command", [["prune", "--keep", "1"], ["repair"]])
def test_nothing_is_changed_while_a_holder_is_alive(call: Any, tmp_path: Path, command: list[str]) -> None:
    """Only the coordinator prunes. A dry run looks all the same."""
    four(tmp_path)
    flip_a_bit(tmp_path / "step-000000040" / "state.pt")
    store.take_epoch(tmp_path, "78", 0, "0")  # this process
    before = names(tmp_path)
    told = call(*command, "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert f"job 78 step 0 (attempt 0), process {os.getpid()} on" in told.err
    assert "--dry-run looks all the same" in told.err
    assert call(*command, "--dry-run", "--dir", tmp_path).code == 0
    assert names(tmp_path) == before


@pytest.mark.parametrize("command", [["prune", "--keep", "1"], ["repair"]])
def test_a_holder_on_another_host_counts_as_at_work_until_something_says_that_it_ended(
    call: Any, tmp_path: Path, command: list[str]
) -> None:
    """From a login node its process cannot be seen: its journal's last word counts, or the person's."""
    four(tmp_path)
    flip_a_bit(tmp_path / "step-000000040" / "state.pt")
    holder = leave(tmp_path, host=ELSEWHERE)
    before = names(tmp_path)
    told = call(*command, "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert f"on {ELSEWHERE} cannot be seen from here" in told.err
    journal = tmp_path / "journal"
    journal.mkdir()
    line = {"event": "exit", "epoch": holder.epoch, "job": "77"}
    for name, text in (
        (f"77-2-0-{holder.epoch}-0.jsonl", json.dumps({**line, "event": "leaving"}) + "\n"),
        (f"77-2-0-{holder.epoch}-1.jsonl", json.dumps(line) + "\n"),
        (f"77-2-0-{holder.epoch - 1}-0.jsonl", json.dumps({**line, "epoch": holder.epoch - 1}) + "\n"),
    ):
        (journal / name).write_text(text)
    assert call(*command, "--dir", tmp_path).code == 1, "neither another task's exit nor an older holder's"
    assert names(tmp_path) == before
    with (journal / f"77-2-0-{holder.epoch}-0.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert call(*command, "--dir", tmp_path).code == 0
    assert names(tmp_path) != before


def test_the_persons_word_is_enough_for_a_holder_that_cannot_be_seen(call: Any, tmp_path: Path) -> None:
    """--holder-is-gone, for a node that died with no last word in its journal."""
    four(tmp_path)
    leave(tmp_path, host=ELSEWHERE)
    assert call("prune", "--keep", "2", "--dir", tmp_path, "--holder-is-gone").code == 0
    assert steps(tmp_path) == [30, 40]


def test_a_start_in_between_stops_every_change(tmp_path: Path) -> None:
    """The mark that a start leaves first is seen right before a rename; so is a holder, and a disk that does not answer."""
    committed(tmp_path, 10)
    held = store.who_holds(tmp_path)
    assert store.taken_since(tmp_path, held) == ""
    mark = tmp_path / claim_name(held.highest_epoch + 1)
    mark.symlink_to("{}")
    assert store.taken_since(tmp_path, held) == "somebody has started here meanwhile"
    mark.unlink()
    store.take_epoch(tmp_path, "79", 0, "0")
    assert store.taken_since(tmp_path, held).startswith("job 79 is at work here")
    assert store.taken_since(tmp_path / ("x" * 300), held) == "the holder cannot be looked at: File name too long"


def test_prune_is_said_with_what_it_freed(call: Any, tmp_path: Path) -> None:
    """One line each, and a sum; and a second run has nothing left to do."""
    four(tmp_path)
    told = call("prune", "--keep", "2", "--dir", tmp_path)
    assert told.lines == [
        "stays            40     1.5 kB  the newest intact one: every byte was read now",
        "stays            30     1.5 kB  within --keep 2",
        "gone             20     1.5 kB",
        "gone             10     1.5 kB",
        "2 checkpoints, 3.0 kB, gone",
    ]
    assert names(tmp_path) == ["latest", "step-000000030", "step-000000040"]
    assert actions(call("prune", "--keep", "2", "--dir", tmp_path, "--json")) == {40: "stays", 30: "stays"}


def test_prune_reads_all_that_count_and_a_flipped_bit_in_any_of_them_keeps_an_older_one(call: Any, tmp_path: Path) -> None:
    """--keep 2, and the second newest is damaged: 20 stays for it, and so does the damaged one."""
    four(tmp_path)
    flip_a_bit(tmp_path / "step-000000030" / "state.pt")
    told = call("prune", "--keep", "2", "--dir", tmp_path)
    assert (told.code, steps(tmp_path)) == (0, [20, 30, 40])
    assert "does not count: step-000000030: corrupt: state.pt" in told.err
    assert "not intact: never pruned, and does not count" in told.out


def test_keep_reads_every_byte_before_it_says_that_a_checkpoint_is_protected(call: Any, tmp_path: Path) -> None:
    """1, the reason, and no mark; one that was protected before is said to be damaged."""
    path = committed(tmp_path, 10)
    flip_a_bit(path / "state.pt")
    told = call("keep", "10", "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert told.err.startswith("ckptctl: step 10 is not protected, since it is not intact: state.pt: corrupt: ")
    assert store.kept_steps(tmp_path) == set()
    store.set_kept(tmp_path, 10, on=True)
    assert "step 10 is protected from before, but it is not intact: " in call("keep", "10", "--dir", tmp_path).err
    assert store.kept_steps(tmp_path) == {10}
