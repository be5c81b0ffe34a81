"""The checkpoint store: what is on the disk, whether it is whole, how it gets there and how it goes.

| module | owns | impure? |
|---|---|---|
| layout | names | no |
| verdict | words of a verification | no |
| manifest | manifest.json | reads |
| look | bounded, patient looking | reads, waits |
| crc, stream | checksums, threads, buffers | reads |
| formats/ | what a file is by its bytes | reads |
| survey | names and sizes, the cheap part | reads |
| reading | one pass over all files | reads |
| origin | whose bytes the wrong ones are | reads |
| verify | a directory against what was meant | reads |
| scan | candidates, newest intact | reads |
| durable | system calls that survive a crash | writes |
| fence | DIR/attempt, one holder | reads, writes, /proc |
| commit | partial -> checkpoint | writes |
| found | what a program wrote, by its names | reads |
| adopt | a copy of that as a checkpoint | reads, writes |
| marks | what a person protects | reads, writes |
| trash | how one leaves, the last look before it goes | writes, deletes |
| retention | what may go | writes, deletes |
| idle | is anybody at work here | reads, /proc |
| repair | what lies beside, quarantine | writes, never deletes a checkpoint |
| failed | whole ones that training fails from | writes, deletes |
| room | whether the next one fits | asks, writes nothing |

Everything here runs in worker threads, takes its bounds as arguments, returns data and logs nothing. It never
unpickles, never maps a file, never follows a link. Values are msgspec Structs: to define one costs 0.01 ms of start-up,
a frozen dataclass 0.5 ms. This package is the façade; other parts import from it and not from its modules.
"""

from ckpt_supervisor.store.adopt import (
    How,
    Refused,
    Signature,
    adopt,
    names_of,
    other_step_named,
    parts_of,
    put_aside,
    resume_path,
    signature,
    sizes_of,
)
from ckpt_supervisor.store.commit import (
    AlreadyThere,
    CommitFailed,
    Committed,
    Fenced,
    Outcome,
    Unheld,
    commit,
    discard,
    make_partial,
    point_latest,
    promote,
    why_not_ours,
)
from ckpt_supervisor.store.durable import free_bytes, sync_file
from ckpt_supervisor.store.failed import (
    FailedStart,
    SetAside,
    WhyFailed,
    all_set_aside,
    answered_for,
    clear_past,
    give_back,
    lead_past,
    set_aside,
)
from ckpt_supervisor.store.fence import check_epoch, read_holder, retake_epoch, take_epoch
from ckpt_supervisor.store.formats import load as load_readers
from ckpt_supervisor.store.found import Incomplete, Item, find, kinds, put_aside_names
from ckpt_supervisor.store.holder import (
    Ask,
    BegunSince,
    HeldByOther,
    Holder,
    can_be_seen,
    describe_holder,
    is_alive,
)
from ckpt_supervisor.store.idle import Held, taken_since, who_holds
from ckpt_supervisor.store.layout import (
    ATTEMPT,
    CONTROL,
    DONE,
    JOURNAL,
    LATEST,
    MANIFEST,
    damaged_name,
    failed_name,
    parse_damaged,
    parse_failed,
    parse_partial,
    parse_step,
    parse_trash,
    partial_name,
    step_name,
    trash_name,
)
from ckpt_supervisor.store.look import Stop, list_names
from ckpt_supervisor.store.manifest import (
    MANIFEST_BYTES_MAX,
    FileEntry,
    Manifest,
    ManifestError,
    encode_manifest,
    path_problem,
    read_manifest,
)
from ckpt_supervisor.store.marks import kept_steps, set_kept
from ckpt_supervisor.store.place import Place
from ckpt_supervisor.store.repair import (
    Done,
    Examined,
    Leftover,
    examine,
    glance,
    latest_name,
    leftovers,
    mend_latest,
    quarantine,
    sweep_one,
    tree_bytes,
)
from ckpt_supervisor.store.retention import Removed, remove, sweep, to_make_room, to_prune, update_latest
from ckpt_supervisor.store.room import Reserve, Room, look_at_room, needed_for, reserve
from ckpt_supervisor.store.scan import Candidate, Choice, Search, is_there_late, latest_step, newest_intact, scan
from ckpt_supervisor.store.stream import Cache
from ckpt_supervisor.store.trash import settled
from ckpt_supervisor.store.verdict import Finding, Mode, Report, Verdict
from ckpt_supervisor.store.verify import Expected, Progress, check_files, check_foreign, verify_checkpoint
from ckpt_supervisor.text import one_line

__all__ = [
    "ATTEMPT",
    "CONTROL",
    "DONE",
    "JOURNAL",
    "LATEST",
    "MANIFEST",
    "MANIFEST_BYTES_MAX",
    "AlreadyThere",
    "Ask",
    "BegunSince",
    "Cache",
    "Candidate",
    "Choice",
    "CommitFailed",
    "Committed",
    "Done",
    "Examined",
    "Expected",
    "FailedStart",
    "Fenced",
    "FileEntry",
    "Finding",
    "Held",
    "HeldByOther",
    "Holder",
    "How",
    "Incomplete",
    "Item",
    "Leftover",
    "Manifest",
    "ManifestError",
    "Mode",
    "Outcome",
    "Place",
    "Progress",
    "Refused",
    "Removed",
    "Report",
    "Reserve",
    "Room",
    "Search",
    "SetAside",
    "Signature",
    "Stop",
    "Unheld",
    "Verdict",
    "WhyFailed",
    "adopt",
    "all_set_aside",
    "answered_for",
    "can_be_seen",
    "check_epoch",
    "check_files",
    "check_foreign",
    "clear_past",
    "commit",
    "damaged_name",
    "describe_holder",
    "discard",
    "encode_manifest",
    "examine",
    "failed_name",
    "find",
    "free_bytes",
    "give_back",
    "glance",
    "is_alive",
    "is_there_late",
    "kept_steps",
    "kinds",
    "latest_name",
    "latest_step",
    "lead_past",
    "leftovers",
    "list_names",
    "load_readers",
    "look_at_room",
    "make_partial",
    "mend_latest",
    "names_of",
    "needed_for",
    "newest_intact",
    "one_line",
    "other_step_named",
    "parse_damaged",
    "parse_failed",
    "parse_partial",
    "parse_step",
    "parse_trash",
    "partial_name",
    "parts_of",
    "path_problem",
    "point_latest",
    "promote",
    "put_aside",
    "put_aside_names",
    "quarantine",
    "read_holder",
    "read_manifest",
    "remove",
    "reserve",
    "resume_path",
    "retake_epoch",
    "scan",
    "set_aside",
    "set_kept",
    "settled",
    "signature",
    "sizes_of",
    "step_name",
    "sweep",
    "sweep_one",
    "sync_file",
    "take_epoch",
    "taken_since",
    "to_make_room",
    "to_prune",
    "trash_name",
    "tree_bytes",
    "update_latest",
    "verify_checkpoint",
    "who_holds",
    "why_not_ours",
]
