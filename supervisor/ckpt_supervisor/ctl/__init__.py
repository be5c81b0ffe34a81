"""The commands of `ckptctl`: main.py has the command line, each other module a command or what several of them share.

Here belong options, exit statuses and who is asked. Not here: how it is drawn (view/), what is read (store/, view/), and what
doctor and drill find out (doctor/, drill/). ckpt-supervise imports nothing of it.
"""
