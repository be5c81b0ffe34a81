"""What is done with the processes below a supervisor: the command, its ranks, and what --on-event and --resubmit run.

Here belongs what has a child started, heard, signalled or ended for a reason. Not here: how that is done (adapters/children.py,
adapters/shield.py), what the kernel shows of it (linux/), and what a dead supervisor has left (start/leftovers.py).
"""
