"""What is found out and put right before the command starts: which job this is, what it resumes from, what the dead have left.

Here belong earlier attempts as their journals tell them, who holds the directory, and what launchers have to be told. Not here:
the start itself (launch.py), and how supervisors meet for it (tasks/).
"""
