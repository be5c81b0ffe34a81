"""What several supervisors need: those of one step's tasks to find each other and act as one, and those of a job's steps to meet.

Not here: the sockets and files by which they do it (adapters/links.py, adapters/rendezvous.py), and what is decided about the
tasks (core/relay.py, core/tasks.py).
"""
