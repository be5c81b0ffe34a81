"""The supervisor: the parent process of one training command, and the tool that inspects what it left. Never imports torch."""
