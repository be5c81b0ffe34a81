"""Reading what happened: journals and checkpoints, for people and scripts. Decides nothing, writes nothing."""
