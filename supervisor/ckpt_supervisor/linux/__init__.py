"""What Linux shows of processes and memory and lets one do to them: /proc, ptrace, cgroups, the OOM killer, /dev/shm.

Here belongs what would be the same for any program that looks after others. Not here: anything that knows of checkpoints, ranks,
options or Slurm, and anything that starts a process. Imports nothing of ours from outside.
"""
