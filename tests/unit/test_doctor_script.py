"""What a job script says, as far as it can be read without running it."""

from __future__ import annotations

import pytest
from ckpt_supervisor.doctor import script, shell, slurm_rules
from ckpt_supervisor.doctor.facts import Setup


def parsed(*lines: str) -> script.Script:
    """A script with these lines after its first one."""
    return script.parse("\n".join(("#!/bin/bash", *lines)), "job.sh")


def test_options_are_known_by_their_long_names_however_they_are_written() -> None:
    """Letters, values in the same word or the next one, several on a line, comments; the last one of a name counts."""
    found = parsed(
        "#SBATCH -t5 --signal=B:USR1@90 -o x.out # five", "", "#SBATCH --time 7 --requeue", "echo", "#SBATCH --no-requeue"
    )
    assert found.sbatch == {"time": "7", "signal": "B:USR1@90", "output": "x.out", "requeue": ""}


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ("-W 5 -K -n2 x -y", {"wait": "5", "kill-on-bad-exit": "", "ntasks": "2"}, ["x", "-y"]),
        ("-K0 --export=NONE --pty bash", {"kill-on-bad-exit": "0", "export": "NONE", "pty": ""}, ["bash"]),
        ("--output o -lu -- x", {"output": "o", "label": ""}, ["--", "x"]),
        ("", {}, []),
    ],
)
def test_options_end_where_the_command_begins(words: str, options: dict[str, str], rest: list[str]) -> None:
    """srun's own, and nothing of what it starts."""
    assert script.options_of(words.split()) == (options, tuple(rest))


def test_sruns_are_found_through_quotes_continued_lines_and_wrappers() -> None:
    """With their lines, the supervisor's options and the command below it; what is in comments and here-documents is text."""
    found = parsed(
        "# srun ckpt-supervise -- nobody",
        "cat <<EOF",
        "don't srun ckpt-supervise -- nobody",
        "EOF",
        "echo it\\'s; true 'a # b'  # don't",
        "if true; then OMP_NUM_THREADS=4 exec srun -N2 \\",
        "    /opt/venv/bin/ckpt-supervise --keep 3 -- bash -c '",
        "    python train.py' &",
        "fi",
        "srun hostname",
        "srun -n1 python -m ckpt_supervisor.cli --dir=b -- x",
    )
    first, second = found.supervised
    assert (first.place, first.options, first.supervise) == ("line 7", {"nodes": "2"}, ("--keep", "3"))
    assert (first.command, first.background) == (("bash", "-c", "\n    python train.py"), True)
    assert (second.place, second.directory, second.command, second.background) == ("line 12", "b", ("x",), False)
    assert len(found.sruns) == 3
    assert found.bare == ()


def test_a_supervisor_without_srun_is_found_and_one_that_is_only_named_is_not() -> None:
    """Also below other programs; `which ckpt-supervise` starts none."""
    found = parsed("which ckpt-supervise", "echo ckpt-supervise", "ckpt-supervise -- a", "mpirun -n 4 ckpt-supervise -- b")
    assert [bare.place for bare in found.bare] == ["line 4", "line 5"]


@pytest.mark.parametrize(
    "lines",
    [
        ["grep -q y <<<yes", 'read -r a <<< "word"'],
        ["PORT=$(( 10000 + (1 << 10) ))", 'python -c "print(1<<20)"', "for ((i=1<<4; i; i--)); do :; done"],
        ["cat <<\\EOF >f", "ckpt-supervise -- nobody", "EOF", "cat <<-END-OF", "ckpt-supervise -- nobody", "\tEND-OF"],
        ["paste <(cat <<A) - <<B", "ckpt-supervise -- a", "A", "ckpt-supervise -- b", "B"],
        ['cd "$(dirname "$(scontrol show job $ID | awk \'{print $2}\')")"', "MSG=$'it\\'s' # don't", "X=${Y#*'}'}"],
        ["LIST=(  # don't", "  a b", ")", "OUT=$(", "  # it's", "  ls", ")"],
        [
            "uv pip install ckpt-supervise",
            "python -m pip install 'ckpt-supervise==1'",
            "ckpt-supervise --version",
            "hash ckpt-supervise",
        ],
        ["if ! command -v ckpt-supervise >/dev/null; then exit 1; fi", 'echo "or: scontrol requeue $SLURM_JOB_ID"'],
        ["run() {", '  srun "$@"', "}", "run ckpt-supervise --dir e -- x"],
    ],
)
def test_what_stands_above_it_hides_no_supervisor_and_is_taken_for_none(lines: list[str]) -> None:
    """As bash reads it: here-strings and shifts are no here-documents, a quote ends where it ends."""
    found = parsed(*lines, "srun ckpt-supervise --dir d -- python t.py")
    assert [(srun.place, srun.directory, srun.command) for srun in found.supervised] == [
        (f"line {len(lines) + 2}", "d", ("python", "t.py"))
    ]
    assert (found.bare, found.requeues) == ((), ())


@pytest.mark.parametrize(
    "line",
    [
        "timeout 23h srun -N2 ckpt-supervise --dir d -- x",
        "nice -n 10 srun -N2 ckpt-supervise --dir d -- x",
        "time -p env -u A srun -N2 ckpt-supervise --dir d -- x",
        "stdbuf -oL srun -N2 ckpt-supervise --dir d -- x 2>&1 | tee >(cat) >>log",
        "srun -N2 bash -lc 'conda activate e && exec ckpt-supervise --dir d -- x'",
        "srun -N2 apptainer exec i.sif sh -c 'ckpt-supervise --dir d -- x'",
        "bash -c 'srun -N2 ckpt-supervise --dir d -- x'",
        'A="-N2"; B="ckpt-supervise --dir d -- x"; srun $A $B',
        'A=(\n --dir d\n); C="srun -N2"; $C ckpt-supervise "${A[@]}" -- x',
        "L=srun; $L -N2 ckpt-supervise --dir d -- x",
        'OUT="$(srun -N2 ckpt-supervise --dir d -- x)"',
    ],
)
def test_an_srun_is_found_behind_other_programs_in_shells_and_in_variables(line: str) -> None:
    """Slurm's signals reach the supervisor in all of these."""
    found = parsed(*line.split("\n"))
    assert [(srun.options, srun.directory, srun.command) for srun in found.supervised] == [({"nodes": "2"}, "d", ("x",))]
    assert found.bare == ()


def test_of_the_arms_of_one_statement_one_runs() -> None:
    """Two sruns that exclude each other share a directory well; one behind the statement, or in another one, does not."""
    found = parsed(
        'if [ -n "$A" ]; then', " srun ckpt-supervise -- a", "elif true; then srun ckpt-supervise -- b", "else",
        ' case "$B" in', "  x) srun ckpt-supervise -- c ;;", "  *) srun ckpt-supervise -- d ;;", " esac", "fi",
        "srun ckpt-supervise -- e", "if true; then srun ckpt-supervise -- f; fi",
    )  # fmt: skip
    runs = {srun.command[0]: srun for srun in found.supervised}
    excluding = {one + other for one in runs for other in runs if one < other and runs[one].excludes(runs[other])}
    assert excluding == {"ab", "ac", "ad", "bc", "bd", "cd"}
    both = script.parse("if true; then srun ckpt-supervise -- a\nelse srun ckpt-supervise -- b\nfi", "x")
    assert "two-sruns" not in {finding.id for finding in slurm_rules.start(Setup("outside", script=both))}
    assert "two-sruns" in {finding.id for finding in slurm_rules.start(Setup("outside", script=found))}


def test_a_directory_that_only_a_run_knows_is_one_word() -> None:
    """What follows it is the command, and no option is missing."""
    for directory in ("$(pwd)/ck", '"$(pwd)/ck"', "`pwd`/ck"):
        (srun,) = parsed(f"srun -n $((2 * 4)) ckpt-supervise --dir {directory} -- python t.py").supervised
        assert (srun.directory, srun.command) == ("$(pwd)/ck", ("python", "t.py"))


def test_each_supervisor_has_the_directory_that_stands_at_its_line() -> None:
    """--dir, a variable of the command's own, or the last export before it."""
    found = parsed(
        "export CKPT_SUPERVISE_DIR=/a",
        "srun ckpt-supervise -- x",
        "CKPT_SUPERVISE_DIR=/b srun ckpt-supervise -- x",
        "srun ckpt-supervise --dir /c -- x",
        "CKPT_SUPERVISE_DIR=/d",
        "srun ckpt-supervise -- x",
    )
    assert [srun.directory for srun in found.supervised] == ["/a", "/b", "/c", "/d"]


def test_traps_requeues_and_what_takes_an_export_none_back() -> None:
    """Signals by name, whatever they are called; a trap that is taken away is none."""
    found = parsed("trap 'scontrol requeue $SLURM_JOB_ID' SIGUSR1 15", "trap - USR2", "trap '' HUP", "unset SLURM_EXPORT_ENV")
    assert found.traps == {"USR1", "TERM", "HUP"}
    assert found.requeues == (2,)
    assert found.exports_all
    assert not parsed("export SLURM_EXPORT_ENV=NONE").exports_all


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("USR1@120", (False, "USR1", 120)),
        ("B:SIGUSR1@90", (True, "USR1", 90)),
        ("R:10", (False, "USR1", 60)),
        ("RB:TERM@5", (True, "TERM", 5)),
    ],
)
def test_the_warning_signal_is_read_as_sbatch_takes_it(value: str, expected: tuple[bool, str, int]) -> None:
    """Flags, name or number, and 60 seconds where none are given (sbatch(1))."""
    assert script.warning_of(value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A/x", "a/x"),
        ("${A}/${B:-$A}", "a/a"),
        ("${B:-}/x", "/x"),
        ("${E:-e}${E-f}", "e"),
        ("$B/$SLURM_JOB_ID", "$B/$SLURM_JOB_ID"),
    ],
)
def test_variables_are_replaced_where_they_are_known(text: str, expected: str) -> None:
    """As bash does it, empty values included; what only a run knows stays as it is written."""
    assert shell.expanded(text, {"A": "a", "E": ""}) == expected


@pytest.mark.parametrize("text", ["'", '"$(', "srun '\n" * 2_000, "\\", "<<", "a <<E\n", "\0", "#SBATCH --time='", "#SBATCH -"])
def test_no_text_is_too_broken_to_be_read(text: str) -> None:
    """A script with an error gives what it gives, quickly."""
    script.parse(text, "x")
