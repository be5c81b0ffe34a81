"""The supervisor: the parent process of one training command, and the tool that inspects what it left. Never imports torch.

| where | what belongs there |
|---|---|
| cli, config, config_specs, config_text, event_names | the command line and the options of ckpt-supervise |
| launch, app, emergency | the start, the one loop, and what is left to do after a fault of our own |
| policies, meaning, lines, text | options as the machine wants them, what a signal asks for; words for journal and user |
| errands | every command of the machine that touches a disk or Slurm |
| core/ | what is decided: pure |
| adapters/ | what touches the operating system, ZeroMQ and Slurm |
| linux/ | what the kernel shows and does, for any program |
| start/ | before the command starts |
| tasks/ | several supervisors |
| processes/ | the processes below us |
| directory/ | the checkpoint directory, beside training |
| watches/ | what looks at the run beside the machine |
| store/ | checkpoints on the disk |
| ctl/ | the commands of ckptctl |
| view/ | journals and checkpoints, for people and scripts |
| doctor/, drill/ | what is wrong with a set-up; the rehearsal |

Each room's __init__.py says what belongs in it and what does not, and imports nothing (store/ is a façade). Who may import whom
is in pyproject.toml.
"""
