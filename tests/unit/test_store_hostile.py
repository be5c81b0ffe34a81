"""Row S5: checkpoint directories that were made to harm are refused in bounded time and memory; nothing runs, nothing is left.

A child process with a limit on its memory looks at them, and an audit hook in it tells of every file that is opened and
every class that a pickle asks for. STORE_HOSTILE_FILES=1000000 adds directories with so many files and more
directories than any checkpoint has, which take minutes to make.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_supervisor.store import FileEntry, Manifest, Verdict, check_foreign, encode_manifest, step_name, verify_checkpoint
from ckpt_supervisor.store.look import list_tree

from tests.support.checkpoint_files import committed_files, safetensors_file, torch_file

MEMORY_BYTES = 1 << 30
SECONDS = 20.0
"""Most of the processor's time that one look at one of them may take, whatever else the machine has to do. That a look waits for
something is seen by the bound on all of them together."""

FILES = int(os.environ.get("STORE_HOSTILE_FILES", "0"))

CHILD = r"""
import json, os, resource, sys, time
root, memory = os.path.realpath(sys.argv[1]), int(sys.argv[2])
from ckpt_supervisor import store
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
bad = []
allowed = (root, sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(store.__file__)))
def hook(event, args):
    if event in ("open", "os.scandir", "os.listdir") and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(args[0]))
        if not path.startswith(allowed):
            bad.append((event, path))
    elif event.startswith(("pickle.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.")):
        bad.append((event, ascii(args)[:100]))
    elif event in ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"):
        bad.append((event, ascii(args)[:100]))
    elif event == "open" and args[2] and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        bad.append((event, ascii(args)[:100]))
sys.addaudithook(hook)
looks = {
    "verify_checkpoint": lambda path: store.verify_checkpoint(path, deep=True),
    "check_foreign": store.check_foreign,
    "check_files": lambda path: store.check_files(path, ())[0],
}
told = {}
for name in sorted(os.listdir(root)):
    for function, look in looks.items():
        began = time.process_time()
        report = look(os.path.join(root, name))
        one_line = report.reason.isprintable() and all(str(finding).isprintable() for finding in report.findings)
        told.setdefault(name, {})[function] = (report.verdict.value, report.reason, time.process_time() - began, one_line)
began = time.process_time()
choice = store.newest_intact(root)
seconds = time.process_time() - began
candidates = len(store.scan(root))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({
    "told": told, "bad": bad, "seconds": seconds, "candidates": candidates, "peak": peak,
    "chosen": choice.chosen and choice.chosen.path.name, "passed_over": len(choice.passed_over), "unknown": choice.unknown,
}))
"""


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def manifest_of(directory: Path, number: int, **changes: Any) -> bytes:
    """An honest manifest of what is there, but without digests, or with something else in it."""
    files = tuple(
        FileEntry(str(path.relative_to(directory)), path.stat().st_size, "", 0)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    )
    manifest = Manifest(
        step=number, world_size=1, ranks=(0,), job="1", attempt=0, epoch=1, cause="x", created_at="", verified="structure",
        files=files or (FileEntry("none", 0, "", 0),),
    )  # fmt: skip
    if not changes:
        return encode_manifest(manifest)
    return msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(manifest) | changes), indent=1) + b"\n"


def archive(name: str, data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of one record."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.writestr(name, data)
    return stream.getvalue()


def sparse(path: Path, size: int, begin: bytes = b"") -> None:
    """A file of this size with almost nothing on the disk."""
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)


def pickle_bombs(directory: Path, mark: Path) -> None:
    """Every file that anybody would unpickle runs a command."""
    bomb = pickle.dumps(Bomb(mark), protocol=2)
    (directory / "state.pt").write_bytes(archive("state/data.pkl", bomb))
    (directory / "legacy.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + bomb * 4)
    (directory / "training_args.bin").write_bytes(bomb)
    (directory / "optimizer.pt").write_bytes(bomb)
    (directory / "trainer_state.json").write_bytes(b'{"global_step": 5}')


def metadata_bomb(directory: Path, mark: Path) -> None:
    """The same in the metadata of torch.distributed.checkpoint."""
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(mark), protocol=4))
    (directory / "__0_0.distcp").write_bytes(torch_file(1))


def huge_pickle(directory: Path, _: Path) -> None:
    """Opcodes that ask for exabytes, and for a list in a list in a list."""
    (directory / ".metadata").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x")
    (directory / "__0_0.distcp").write_bytes(b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".")
    (directory / "deep.pt").write_bytes(b"\x80\x02" + b"(" * 3_000_000 + b".")
    (directory / "wide.pt").write_bytes(b"\x80\x02r" + b"\xff\xff\xff\x7f" + b"." * 100)


def zip_bomb(directory: Path, _: Path) -> None:
    """64 MiB of zeros in 64 KiB, and a record that says it holds 2^62 bytes."""
    (directory / "state.pt").write_bytes(archive("state/data.pkl", bytes(1 << 26), zipfile.ZIP_DEFLATED))
    good = bytearray(archive("state/data.pkl", b"x" * 100))
    at = good.rindex(b"PK\x01\x02")
    good[at + 20 : at + 28] = b"\xfe\xff\xff\xff" * 2
    (directory / "lies.pt").write_bytes(good)


def zip_of_many(directory: Path, _: Path) -> None:
    """A directory of 2^63 records, and one of 65,535 in 22 bytes."""
    head = archive("state/data.pkl", b"x")[:50]
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 63, 1 << 63, 1 << 63, 50)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 50, 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (directory / "a.pt").write_bytes(head + end64 + locator + end)
    (directory / "b.pt").write_bytes(head + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0, 50, 0))


def safetensors_of_many(directory: Path, _: Path) -> None:
    """Headers of 100 MB: of nothing, of brackets, of numbers, of names."""
    length = 100_000_000
    for name, part in (("a", b"["), ("b", b"1,"), ("c", b'"n":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},')):
        text = b'{"t":' + part * (20_000_000 // len(part))
        sparse(directory / f"{name}.safetensors", length + 8, struct.pack("<Q", length) + text)
    sparse(directory / "d.safetensors", 1 << 39, struct.pack("<Q", length) + b'{"')


def index_of_many(directory: Path, _: Path) -> None:
    """An index that leaves the directory, one that names half a million files, and one of 64 MiB of brackets."""
    (directory / "a.safetensors.index.json").write_bytes(b'{"weight_map": {"a": "../../../etc/passwd", "b": "/etc/passwd"}}')
    names = ",".join(f'"{number}":"{number}"' for number in range(490_000))
    (directory / "b.safetensors.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    (directory / "c.safetensors.index.json").write_bytes(b'{"weight_map":' + b"[" * (1 << 26))


def links(directory: Path, _: Path) -> None:
    """To a file, to a directory, to itself, to the parent."""
    (directory / "model.safetensors").write_bytes(safetensors_file(["a"], 1))
    for name, target in (("passwd", "/etc/passwd"), ("etc", "/etc"), ("loop", "loop"), ("up", ".."), ("gone", "/none/such")):
        (directory / name).symlink_to(target)


def special_files(directory: Path, _: Path) -> None:
    """FIFOs and sockets under names that are opened by readers of sets, were they files."""
    for name in (".metadata", "trainer_state.json", "model.safetensors.index.json", "latest"):
        os.mkfifo(directory / name)
    here = Path.cwd()
    os.chdir(directory)  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("meta.pt")
    os.chdir(here)


def names(directory: Path, _: Path) -> None:
    """Line ends, escapes, invalid UTF-8, the longest name there is."""
    for name in (b"new\nline.pt", b"\x1b[2J.pt", b"\xff\xfe.pt", b"n" * 255, b"..pt", "\u202egnp.exe".encode()):
        with open(os.fsencode(directory) + b"/" + name, "wb") as file:  # noqa: PTH123
            file.write(b"x")


def deep_tree(directory: Path, _: Path) -> None:
    """200 directories inside each other."""
    here = os.open(directory, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def many_directories(directory: Path, _: Path) -> None:
    """350 directories with 350 each: more than any checkpoint has, and never many at once."""
    for number in range(350):
        (directory / str(number)).mkdir()
        for inner in range(350):
            os.mkdir(f"{directory}/{number}/{inner}")  # noqa: PTH102


def many_files(directory: Path, _: Path) -> None:
    """More files than any checkpoint has."""
    for number in range(FILES):
        os.mknod(f"{directory}/{number}")


def hollow(directory: Path, _: Path) -> None:
    """Files of 2^42 bytes that take nothing on the disk."""
    sparse(directory / "weights.bin", 1 << 42)
    sparse(directory / "model.bin", 1 << 42, b"x")


def many_states(directory: Path, _: Path) -> None:
    """Directories whose files would be read for the sets, 64 MiB each that take nothing on the disk."""
    for number in range(150):
        (directory / str(number)).mkdir()
        sparse(directory / str(number) / "model.bin.index.json", 1 << 26, b'{"x":"')
        sparse(directory / str(number) / "trainer_state.json", 1 << 26, b"{")


ZOO: dict[str, tuple[Callable[[Path, Path], None], frozenset[str]]] = {
    "pickle bombs": (pickle_bombs, frozenset({"missing", "corrupt", "foreign", "truncated"})),
    "bomb in the metadata": (metadata_bomb, frozenset({"intact", "corrupt", "foreign", "truncated", "missing"})),
    "huge pickles": (huge_pickle, frozenset({"intact", "corrupt", "foreign", "truncated", "missing"})),
    "zip bomb": (zip_bomb, frozenset({"corrupt"})),
    "zip of many": (zip_of_many, frozenset({"corrupt"})),
    "safetensors of many": (safetensors_of_many, frozenset({"corrupt"})),
    "index of many": (index_of_many, frozenset({"missing", "foreign"})),
    "links": (links, frozenset({"foreign"})),
    "special files": (special_files, frozenset({"foreign"})),
    "names": (names, frozenset({"foreign"})),
    "deep tree": (deep_tree, frozenset({"foreign"})),
    "hollow": (hollow, frozenset({"corrupt"})),
    "many states": (many_states, frozenset({"corrupt"})),
}
"""How each is made, and the verdicts that it may get without a manifest."""

if FILES:
    ZOO |= {"many directories": (many_directories, frozenset({"foreign"})), "many files": (many_files, frozenset({"foreign"}))}

MANIFESTS: dict[str, Callable[[Path], bytes]] = {
    "of brackets": lambda _: b"[" * 33_000_000,
    "of numbers": lambda directory: manifest_of(directory, 1, ranks=list(range(1_500_000))),
    "of files": lambda directory: manifest_of(
        directory, 1, files=[{"path": "a", "bytes": 1, "xxh3_128": "", "rank": 0}] * 400_000
    ),
    "of a path that leaves": lambda directory: manifest_of(
        directory, 1, files=[{"path": "../../../etc/passwd", "bytes": 1, "xxh3_128": "", "rank": 0}]
    ),
    "of an absolute path": lambda directory: manifest_of(
        directory, 1, files=[{"path": "/etc/passwd", "bytes": 1, "xxh3_128": "", "rank": 0}]
    ),
    "of names on two lines": lambda directory: manifest_of(
        directory, 1, files=[{"path": "a\nb", "bytes": 1, "xxh3_128": "", "rank": 0}]
    ),
    "of a huge step": lambda directory: manifest_of(directory, 1, step=10**400),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, list[str]]]:
    """All of them as committed checkpoints beside a good one of step 1; and the file that a bomb would leave."""
    root = tmp_path_factory.mktemp("zoo")
    mark = root.parent / f"{root.name}-was-here"
    bomb = pickle.dumps(Bomb(mark), protocol=2)  # in a file that is well-formed, and so is none of the store's business
    committed_files(root, 1, {"state.pt": torch_file(1), "bomb.pt": archive("bomb/data.pkl", bomb), "bomb.bin": bomb})
    shutil.rmtree(root / "journal", ignore_errors=True)
    kinds = [*ZOO, *MANIFESTS]
    for number, kind in enumerate(kinds):
        directory = root / step_name(number + 2)
        directory.mkdir()
        if kind in ZOO:
            ZOO[kind][0](directory, mark)
            if kind not in {"names", "many files", "many states", "deep tree", "many directories"}:
                (directory / "manifest.json").write_bytes(manifest_of(directory, number + 2))
        else:
            (directory / "a").write_bytes(b"x")
            (directory / "manifest.json").write_bytes(MANIFESTS[kind](directory))
    yield root, mark, kinds
    shutil.rmtree(root)


def test_nothing_hostile_harms_whoever_looks(zoo: tuple[Path, Path, list[str]]) -> None:
    """Each gets its verdict from every way to look, in bounded time and memory, and the good one is chosen at the end."""
    root, mark, kinds = zoo
    command = [sys.executable, "-c", CHILD, str(root), str(MEMORY_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert not mark.exists()
    assert told["bad"] == []
    assert (told["chosen"], told["passed_over"], told["candidates"]) == (step_name(1), len(kinds), len(kinds) + 1)
    slow = []
    for number, kind in enumerate(kinds):
        looks = told["told"][step_name(number + 2)]
        print(
            kind,
            {function: (verdict, reason[:150], round(seconds, 2)) for function, (verdict, reason, seconds, _) in looks.items()},
        )
        assert looks["verify_checkpoint"][0] != "intact", kind
        if kind in ZOO:
            assert looks["check_foreign"][0] in ZOO[kind][1], (kind, looks)
            assert looks["check_files"][0] != "unknown", (kind, looks)
        assert all(one_line for *_, one_line in looks.values()), kind
        slow += [(kind, function, seconds) for function, (_, _, seconds, _) in looks.items() if seconds > SECONDS]
    print(f"peak {told['peak'] / 2**20:.0f} MiB, newest_intact {told['seconds']:.1f} s")
    assert slow == []
    assert told["seconds"] < SECONDS


def test_a_listing_ends_at_its_bound(tmp_path: Path) -> None:
    """As many files, or as many directories, as fit are listed; one more is refused, however they are nested."""
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        for inner in range(9):
            (tmp_path / str(number) / str(inner)).mkdir()
    tree = list_tree(tmp_path, "", files_max=301)
    assert (len(tree.directories), tree.refused) == (301, [])
    for _ in range(2):
        tree = list_tree(tmp_path, "", files_max=200)
        assert len(tree.directories) + len(tree.files) <= 201
        assert tree.refused == [("", "holds more than 200 files and directories")]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        for number in range(300):
            (tmp_path / str(number)).touch()


def test_a_path_given_by_a_person_is_looked_at_and_not_followed(tmp_path: Path) -> None:
    """A link, a FIFO, nothing at all and an impossible name each get a verdict."""
    (tmp_path / "link.pt").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "new\nline.pt").write_bytes(b"x")
    verdicts = {
        "link.pt": Verdict.FOREIGN, "fifo.pt": Verdict.FOREIGN, "empty": Verdict.MISSING, "none.pt": Verdict.MISSING,
        "new\nline.pt": Verdict.FOREIGN, "nul\0.pt": Verdict.MISSING, "n" * 300: Verdict.UNKNOWN,
        "link.pt/below": Verdict.MISSING,
    }  # fmt: skip
    for name, verdict in verdicts.items():
        report = check_foreign(tmp_path / name)
        assert report.verdict is verdict, report
        assert report.reason.isprintable()


CUTTER = """
import os, sys
path, small, large = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.truncate(path, small)
os.truncate(path, large)
print("cutting", flush=True)
while os.getppid() == int(sys.argv[4]):
    os.truncate(path, small)
    os.truncate(path, large)
"""


@pytest.mark.parametrize("kind", ["torch zip", "safetensors", "plain"])
def test_a_file_that_another_process_cuts_is_an_answer(tmp_path: Path, kind: str) -> None:
    """Truncated in a loop while it is looked at: a verdict each time, and never SIGBUS (field case 77)."""
    files = {
        "torch zip": torch_file(bytes(3_000_000)),
        "safetensors": safetensors_file([f"t{number}" for number in range(1_000)], 1),
        "plain": bytes(range(256)) * 12_000,
    }
    data = files[kind]
    checkpoint = committed_files(tmp_path, 5, {"state": data})
    command = [sys.executable, "-c", CUTTER, str(checkpoint / "state"), str(len(data) // 3), str(len(data)), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cutter:
        try:
            assert cutter.stdout is not None
            assert cutter.stdout.readline() == "cutting\n"
            verdicts = {verify_checkpoint(checkpoint).verdict for _ in range(25)}
            verdicts |= {check_foreign(checkpoint / "state").verdict for _ in range(25)}
        finally:
            cutter.kill()
    assert verdicts <= {Verdict.INTACT, Verdict.TRUNCATED, Verdict.CORRUPT}
    assert verdicts & {Verdict.TRUNCATED, Verdict.CORRUPT}


def test_a_file_that_grows_while_it_is_read_is_still_being_written(tmp_path: Path) -> None:
    """Whoever looks too early is told that, and not that the file is broken."""
    path = tmp_path / "growing.bin"
    path.write_bytes(b"x" * 1_000_000)

    def grow(_: int, __: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    report = check_foreign(path, progress=grow)
    assert (report.verdict, report.findings[0].reason) == (Verdict.CORRUPT, "is still being written")


def test_a_look_can_be_ended_early(tmp_path: Path) -> None:
    """Whatever is being looked at: unknown, since nobody has seen it all."""
    stop = threading.Event()
    stop.set()
    (tmp_path / "state.pt").write_bytes(torch_file(1))
    for path in (tmp_path, tmp_path / "state.pt"):
        assert check_foreign(path, stop=stop).verdict is Verdict.UNKNOWN
