"""The checkpoint store: what is on the disk, whether it is whole, how it gets there and how it goes.

| module | owns | impure? |
|---|---|---|
| layout | names | no |
| verdict | words of a verification | no |
| manifest | manifest.json | reads |
| look | bounded, patient looking | reads, waits |
| crc, stream | checksums, threads, buffers | reads |
| formats/ | what a file is by its bytes | reads |
| verify | a directory against what was meant | reads |
| scan | candidates, newest intact | reads |
| durable | system calls that survive a crash | writes |
| fence | DIR/attempt, one holder | reads, writes, /proc |
| commit | partial -> checkpoint | writes |
| retention | what may go | writes, deletes |

Everything here runs in worker threads, takes its bounds as arguments, returns data and logs nothing. It never
unpickles, never maps a file, never follows a link. Values are msgspec Structs: to define one costs 0.01 ms of start-up,
a frozen dataclass 0.5 ms. This package is the façade; other parts import from it and not from its modules.
"""

from ckpt_supervisor.store.commit import (
    AlreadyThere,
    CommitFailed,
    Committed,
    Fenced,
    Outcome,
    commit,
    discard,
    make_partial,
    point_latest,
    promote,
)
from ckpt_supervisor.store.durable import free_bytes, sync_file
from ckpt_supervisor.store.fence import HeldByOther, Holder, check_epoch, is_alive, read_holder, take_epoch
from ckpt_supervisor.store.layout import (
    ATTEMPT,
    JOURNAL,
    LATEST,
    MANIFEST,
    damaged_name,
    parse_damaged,
    parse_partial,
    parse_step,
    parse_trash,
    partial_name,
    step_name,
    trash_name,
)
from ckpt_supervisor.store.look import Stop
from ckpt_supervisor.store.manifest import (
    MANIFEST_BYTES_MAX,
    FileEntry,
    Manifest,
    ManifestError,
    encode_manifest,
    path_problem,
    read_manifest,
)
from ckpt_supervisor.store.retention import Removed, remove, sweep, to_prune, update_latest
from ckpt_supervisor.store.scan import Candidate, Choice, newest_intact, scan
from ckpt_supervisor.store.verdict import Finding, Mode, Report, Verdict
from ckpt_supervisor.store.verify import Expected, Progress, check_files, verify_checkpoint

__all__ = [
    "ATTEMPT",
    "JOURNAL",
    "LATEST",
    "MANIFEST",
    "MANIFEST_BYTES_MAX",
    "AlreadyThere",
    "Candidate",
    "Choice",
    "CommitFailed",
    "Committed",
    "Expected",
    "Fenced",
    "FileEntry",
    "Finding",
    "HeldByOther",
    "Holder",
    "Manifest",
    "ManifestError",
    "Mode",
    "Outcome",
    "Progress",
    "Removed",
    "Report",
    "Stop",
    "Verdict",
    "check_epoch",
    "check_files",
    "commit",
    "damaged_name",
    "discard",
    "encode_manifest",
    "free_bytes",
    "is_alive",
    "make_partial",
    "newest_intact",
    "parse_damaged",
    "parse_partial",
    "parse_step",
    "parse_trash",
    "partial_name",
    "path_problem",
    "point_latest",
    "promote",
    "read_holder",
    "read_manifest",
    "remove",
    "scan",
    "step_name",
    "sweep",
    "sync_file",
    "take_epoch",
    "to_prune",
    "trash_name",
    "update_latest",
    "verify_checkpoint",
]
