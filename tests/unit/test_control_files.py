"""DIR/control: what is obeyed, by whom it has to be, and that hostile files cost nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor import store
from ckpt_supervisor.watches import control_files
from ckpt_supervisor.watches.control_files import Answer, Found, NotOurs, Place, Request

from tests.support.ctl_stage import committed


def place_in(root: Path, epoch: int = 3) -> Place:
    """A start that looks at this directory."""
    control_files.make_place(root, os.geteuid())
    return Place(root, "77", "0", epoch, os.geteuid())


def request(**changes: object) -> Request:
    """A request that the start above obeys."""
    made = Request(control_files.new_nonce(), "77", "0", 2, 3, "save", "alice", "login1", "2026-01-31T12:00:00+00:00")
    return msgspec.structs.replace(made, **changes)


def names(root: Path) -> list[str]:
    """What lies in DIR/control."""
    return sorted(path.name for path in (root / "control").iterdir())


def test_a_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    """It is gone from its name before it is obeyed, so that nobody obeys it twice; its last word ends that."""
    place, asked = place_in(tmp_path), request(what="leave", requeue=True)
    control_files.post(tmp_path, asked)
    assert names(tmp_path) == [f"{asked.nonce}.json"]
    assert control_files.look(place) == Found((asked,))
    assert control_files.look(place) == Found()
    assert not control_files.withdraw(tmp_path, asked.nonce)
    assert control_files.read_answer(tmp_path, asked.nonce) is None
    assert control_files.answer(tmp_path, Answer(asked.nonce, "taken")) == ""
    assert names(tmp_path) == [f"{asked.nonce}.answer", f"{asked.nonce}.taken"]
    last = Answer(asked.nonce, "saved", 1200, "/ckpt/step-000001200", "")
    assert control_files.answer(tmp_path, last) == ""
    assert control_files.read_answer(tmp_path, asked.nonce) == last
    control_files.forget(tmp_path, asked.nonce)
    assert names(tmp_path) == []


def test_several_requests_are_taken_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Names are random: the time that each one tells decides."""
    place = place_in(tmp_path)
    asked = [request(at=f"2026-01-31T12:00:0{second}+00:00") for second in (3, 1, 2)]
    for one in asked:
        control_files.post(tmp_path, one)
    assert [one.at[18] for one in control_files.look(place).taken] == ["1", "2", "3"]


def test_what_was_taken_back_is_not_obeyed(tmp_path: Path) -> None:
    """Whoever renames it has it: the one who asked, or the supervisor."""
    place, asked = place_in(tmp_path), request()
    control_files.post(tmp_path, asked)
    assert control_files.withdraw(tmp_path, asked.nonce)
    assert control_files.look(place) == Found()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epoch": 2}, "is for another start (epoch 2, attempt 2); here is epoch 3"),
        ({"job": "78"}, "is for job 78 step 0; here is job 77 step 0"),
        ({"step_id": "1"}, "is for job 77 step 1; here is job 77 step 0"),
        ({"format": 2}, "has format 2; this supervisor knows 1"),
        ({"every_ms": 0, "what": "every"}, "asks for an interval of 0 ms"),
        ({"every_ms": -5, "what": "every"}, "asks for an interval of -5 ms"),
        ({"who": "x" * 300}, "holds a text that is too long"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_meant_for_another_start_or_is_no_request_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    """Removed, named, and the one who waits for it is told; a requeued attempt does not obey what was for the one before."""
    place, asked = place_in(tmp_path), request(**changes)
    control_files.post(tmp_path, asked)
    (refused,) = control_files.look(place).refused
    assert (refused.name, refused.reason, refused.removed) == (f"{asked.nonce}.json", said, True)
    answer = control_files.read_answer(tmp_path, asked.nonce)
    assert answer is not None
    assert (answer.result, answer.reason) == ("refused", said)
    assert control_files.look(place) == Found()


def with_two_names(path: Path) -> None:
    """An old request of the owner's, brought back by a hard link."""
    outside = path.parent.parent / "outside"
    outside.write_bytes(msgspec.json.encode(request(nonce=path.stem)))
    path.hardlink_to(outside)


def linked(path: Path) -> None:
    """A symbolic link to a good request."""
    outside = path.parent.parent / "elsewhere"
    outside.write_bytes(msgspec.json.encode(request(nonce=path.stem)))
    path.symlink_to(outside)


def nested(path: Path) -> None:
    """A directory with something in it: it cannot be removed."""
    path.mkdir()
    (path / "x").touch()


def copied(path: Path) -> None:
    """A request under another name than its own."""
    path.write_bytes(msgspec.json.encode(request()))


HOSTILE: list[tuple[str, Callable[[Path], object], bool]] = [
    ("has another name, too", with_two_names, True),
    ("is a link", linked, True),
    ("is a FIFO", os.mkfifo, True),
    ("is a directory", nested, False),
    ("is a directory", lambda path: path.mkdir(), True),
    ("has 5000 bytes", lambda path: path.write_bytes(b"{" * 5_000), True),
    ("has 8796093022208 bytes", lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 43), True),
    ("cannot be read", lambda path: path.write_bytes(b"\0\xff{[" * 900), True),
    ("cannot be read", lambda path: path.write_bytes(b"[" * 4_000), True),
    ("cannot be read", lambda path: path.write_bytes(b""), True),
    ("cannot be read", lambda path: path.write_bytes(b'{"what": "rm -rf"}'), True),
    ("is a copy of another one", copied, True),
]


@pytest.mark.parametrize(("said", "make", "goes"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_refused_and_removed_if_they_can_be(
    tmp_path: Path, said: str, make: Callable[[Path], object], goes: bool
) -> None:
    """Links, FIFOs, directories, huge, garbage and doubled files; a good one beside them is obeyed."""
    place, good = place_in(tmp_path), request()
    bad = place.path / f"{control_files.new_nonce()}.json"
    make(bad)
    control_files.post(tmp_path, good)
    found = control_files.look(place)
    assert found.taken == (good,)
    (refused,) = found.refused
    assert refused.name == bad.name
    assert said in refused.reason
    assert (refused.removed, os.path.lexists(bad)) == (goes, not goes)


def test_what_another_user_wrote_is_not_obeyed(tmp_path: Path) -> None:
    """A good request in every way, but the file is not the supervisor's own user's; tests/process has it with two users."""
    control_files.make_place(tmp_path, os.geteuid())
    control_files.post(tmp_path, request())
    place = Place(tmp_path, "77", "0", 3, os.geteuid() + 1)
    (refused,) = control_files.look(place).refused
    assert refused.reason == f"belongs to user {os.geteuid()}, and only the owner of the job may ask"
    assert refused.removed


def test_names_that_are_no_requests_are_left_alone_unless_they_end_as_one(tmp_path: Path) -> None:
    """`notes.txt` is somebody's; `save.json` looks like a request and is named."""
    place = place_in(tmp_path)
    for name in ("notes.txt", "save.json"):
        (place.path / name).touch()
    (refused,) = control_files.look(place).refused
    assert (refused.name, refused.reason) == ("save.json", "has no name of a request")
    assert names(tmp_path) == ["notes.txt"]


def test_the_directory_has_to_be_ones_own_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Made with 0700, tightened where others may write, refused where it is another user's, a link, or a file."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    control_files.make_place(tmp_path / "a", os.geteuid())
    (tmp_path / "b" / "control").mkdir()
    (tmp_path / "b" / "control").chmod(0o777)
    control_files.make_place(tmp_path / "b", os.geteuid())
    assert [(tmp_path / name / "control").stat().st_mode & 0o777 for name in ("a", "b")] == [0o700, 0o700]
    with pytest.raises(NotOurs, match=f"belongs to user {os.geteuid()}"):
        control_files.make_place(tmp_path / "b", os.geteuid() + 1)
    (tmp_path / "c" / "control").symlink_to(tmp_path / "a")
    with pytest.raises(NotOurs, match="is a link"):
        control_files.make_place(tmp_path / "c", os.geteuid())
    (tmp_path / "d" / "control").touch()
    with pytest.raises(NotOurs, match="is a file"):
        control_files.make_place(tmp_path / "d", os.geteuid())


def test_another_directory_in_its_place_is_neither_obeyed_nor_tidied(tmp_path: Path) -> None:
    """Who may write to DIR, a group say, can put a link to a directory of ours there, or one of his own."""
    place, asked = place_in(tmp_path), request()
    (tmp_path / "mine").mkdir()
    for name in ("package.json", f"{asked.nonce}.json"):
        (tmp_path / "mine" / name).write_bytes(msgspec.json.encode(asked))
    (tmp_path / "control").rename(tmp_path / "aside")
    (tmp_path / "control").symlink_to("mine")
    with pytest.raises(OSError, match="control"):
        control_files.look(place)
    assert control_files.answer(tmp_path, Answer(asked.nonce, "refused"))
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == sorted([f"{asked.nonce}.json", "package.json"])
    (tmp_path / "control").unlink()
    (tmp_path / "control").mkdir()
    if os.geteuid() == 0:  # Nobody else can give a directory away.
        os.chown(tmp_path / "control", 65534, 65534)
        with pytest.raises(NotOurs):
            control_files.look(place)
        with pytest.raises(NotOurs):
            control_files.post(tmp_path, asked)


def test_a_start_gives_what_an_earlier_one_had_taken_its_last_word(tmp_path: Path) -> None:
    """Taken, and the supervisor was killed before it was done: never obeyed again, and the one who waits is told."""
    place, asked = place_in(tmp_path), request()
    control_files.post(tmp_path, asked)
    control_files.look(place)
    old = place.path / f"{control_files.new_nonce()}.answer"
    old.touch()
    os.utime(old, (1_000_000_000, 1_000_000_000))
    assert control_files.tidy(place_in(tmp_path, epoch=4)) == (asked.nonce,)
    answer = control_files.read_answer(tmp_path, asked.nonce)
    assert answer is not None
    assert answer.result == "refused"
    assert "ended before it was done" in answer.reason
    assert names(tmp_path) == [f"{asked.nonce}.answer"]
    assert control_files.look(place_in(tmp_path, epoch=4)) == Found()


def test_neither_sweep_nor_repair_nor_the_lists_touch_it(tmp_path: Path) -> None:
    """It is no rubbish: the sweep of a start, `repair`'s leftovers and the list of checkpoints pass it by."""
    committed(tmp_path, 5)
    asked = request()
    control_files.make_place(tmp_path, os.geteuid())
    control_files.post(tmp_path, asked)
    epoch = store.take_epoch(tmp_path, "77", 3, "0").epoch
    assert store.sweep(tmp_path, epoch).names == ()
    assert store.leftovers(tmp_path) == ()
    assert [candidate.step for candidate in store.scan(tmp_path)] == [5]
    assert names(tmp_path) == [f"{asked.nonce}.json"]


def test_a_request_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Without the directory there is nothing to withdraw, and the look says that it could not look."""
    with pytest.raises(FileNotFoundError):
        control_files.post(tmp_path, request())
    with pytest.raises(FileNotFoundError):
        control_files.look(Place(tmp_path, "77", "0", 3, os.geteuid()))
    assert control_files.answer(tmp_path, Answer("0" * 32, "done")) != ""
