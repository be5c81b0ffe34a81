"""What looks at the run beside the machine, and who is told: hangs, progress, memory, the owner's wishes, --on-event, metrics.

Here belongs what training could do without: each watch sees events and lines pass, and may fail alone. The files by which a job's
owner finds its directory and asks for something are here as well. Not here: what a save or an exit waits for.
"""
