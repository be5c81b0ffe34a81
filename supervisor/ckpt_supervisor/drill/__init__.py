"""The rehearsal: `ckptctl drill` plays Slurm for the user's own command, or has the real one disturb short jobs of its own.

| module | what | impure? |
|---|---|---|
| plan.py | the paths, in words, and what the drill was told | no |
| controller.py | what Slurm does to a job, when, and what its record says then | no |
| scontrol.py | the texts that the stand-in for `scontrol` prints; run as a program, it prints them | file of the job |
| facts.py | journal lines of one attempt, read into times | no |
| verdict.py | PASS or FAIL, why, what would have been lost, what to do | no |
| rehearse.py | one path from start to end, on whatever ground | waits |
| local.py | the ground without Slurm: processes, signals, the job's file | yes |
| cluster.py | the ground with Slurm: sbatch, scancel, scontrol | yes |
| running.py | the rehearsal on a job of the user's that runs already | yes |
| site.py | KillWait and GraceTime of the real site | asks scontrol |
| picture.py | what is shown of all that, while it runs and at the end | writes to a terminal |

ckpt-supervise imports nothing of it.
"""
