"""What the documents say in tables is what the code does: options, exit statuses, words, events, links."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from ckpt_client import wire
from ckpt_supervisor import config
from ckpt_supervisor.core import between, policy
from ckpt_supervisor.core.state import Phase, Stage
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.store import Verdict

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted((ROOT / "supervisor" / "ckpt_supervisor").rglob("*.py"))


def table(name: str, head: str) -> list[list[str]]:
    """The rows of the table in this document whose first head cell is `head`, cell by cell."""
    lines = (ROOT / name).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def code_words(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_readme_lists_every_option_with_its_default() -> None:
    """Name, placeholder and default of each option, and no option that does not exist."""
    expected = {
        spec.name: (f"--{spec.name}" + ("" if spec.is_flag else f" {spec.metavar}"), spec.default) for spec in config.SPECS
    }
    expected["config"] = ("--config FILE", "")
    found = {}
    for option, default, _ in table("README.md", "option"):
        (written,) = code_words(option)
        found[written.split()[0].removeprefix("--")] = (written, "".join(code_words(default)))
    assert found == expected


def test_every_journal_event_is_described() -> None:
    """The names that the code writes, each once in docs/journal.md, and none that it does not write."""
    source = "\n".join(path.read_text() for path in SOURCES)
    written = set(re.findall(r"(?:Entry|_info)\(\s*\"([a-z_]+)\"", source)) - {"rank_"}
    written |= {f"rank_{stage.value}" for stage in Stage} | {"journal_lines_lost", "journal_full", "journal_anew"}
    text = (ROOT / "docs" / "journal.md").read_text()
    described = re.findall(r"^\| `([a-z_]+)` \| (?:debug|info|warning|error)", text, re.MULTILINE)
    assert sorted(described) == sorted(written)


def test_the_protocol_lists_every_word_with_its_fields() -> None:
    """Names and fields of all words, in the order in which they travel, and the version."""
    found = {
        code_words(name)[0]: [field.strip() for field in fields.split(",")]
        for head in ("from a rank", "to a rank", "from a relay", "from the coordinator")
        for name, fields, _ in table("docs/protocol.md", head)
    }
    kinds = (wire.Said, wire.ToRank, between.Up, between.Down)
    words = [word for kind in kinds for word in typing.get_args(kind)]
    assert found == {word.__name__: list(word.__struct_fields__) for word in words}
    assert f"Version **{wire.VERSION}**" in (ROOT / "docs" / "protocol.md").read_text()


def test_the_protocol_lists_every_phase() -> None:
    """One line for each phase of the core, in their order."""
    assert [row[0] for row in table("docs/protocol.md", "phase")] == [phase.name for phase in Phase]


def test_the_store_lists_every_verdict() -> None:
    """One line for each verdict, in their order."""
    assert [row[0] for row in table("docs/store.md", "verdict")] == [verdict.value for verdict in Verdict]


@pytest.mark.parametrize("name", ["README.md", "docs/exit-codes.md"])
def test_exit_statuses_are_those_of_the_code(name: str) -> None:
    """The statuses that have a name in the code are in the table."""
    text = " ".join(row[0] for row in table(name, "code"))
    for status in (0, policy.EXIT_CANCELLED, policy.EXIT_INTERRUPTED, policy.EXIT_STALE, 2, 126, 127):
        assert str(status) in text.replace(",", " ").split()


def test_every_ckptctl_command_is_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """`ckptctl --help` and the README name the same commands."""
    with pytest.raises(SystemExit):
        ctl.main(["--help"])
    commands = re.findall(r"^    ([a-z]+) {2,}", capsys.readouterr().out, re.MULTILINE)
    assert commands
    assert set(re.findall(r"^ckptctl ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE)) == set(commands)


def test_the_readme_opens_with_the_two_commands() -> None:
    """A title, one sentence, then `make demo` and `make test`; both are targets of the Makefile."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line]
    assert lines[0].startswith("# ")
    assert lines[2] == "```"
    assert [line.split("#")[0].strip() for line in lines[3:5]] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in ("demo", "test"))


def test_decisions_are_numbered_in_a_row_and_have_their_three_parts() -> None:
    """docs/decisions: NNNN-title.md from 0001 on, each with context, decision and consequences."""
    papers = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(paper.name[:4]) for paper in papers] == list(range(1, len(papers) + 1))
    for paper in papers:
        assert re.findall(r"^## (.+)$", paper.read_text(), re.MULTILINE) == ["Context", "Decision", "Consequences"], paper.name


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file that is there."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target
