"""What is wrong with a set-up, found before it costs a run: `ckptctl doctor`, and a short form at every start.

| module | owns | impure? |
|---|---|---|
| finding | one finding, how grave it is | no |
| facts | what was looked at, as plain data | no |
| shell | a job script's lines as words | no |
| script | what a job script says | no |
| slurm_rules | site, job and script: what is wrong there | no |
| notice_rules | whether a notice comes, and is long enough | no |
| place_rules | directory, TMPDIR, clock, versions: what is wrong there | no |
| ask | asks Slurm, and /proc for sruns | asks |
| probe | tries the directory, in a child of its own | writes, removes |
| look | runs the probe with a bound, versions | starts children |
| at_start | the short form | in lanes |

Nothing here changes anything but the probe's own files. Must not be imported before the command runs.
"""
