"""What a supervisor at work does to its checkpoint directory: commits saves, adopts what others wrote, removes what is old.

Here belongs what the options and the moment have to do with it, each as a function for a lane (errands.py). Not here: how a
checkpoint is made, judged and removed (store/), and what is read before the command starts (start/).
"""
