"""What touches the operating system, ZeroMQ and Slurm: one module for each thing outside, with its words turned into plain data.

Here belong signals, the command's start and its guard, sockets and what travels over them, `scontrol`, the journal's file, lanes,
stderr. Not here: what decides, knows the options or has two of these work together. Its modules do not import each other, but for
the small ones that some of them stand on (slurm_text.py, guard.py, closings.py, garbage.py, invitation.py).
"""
