"""The launcher behind `waystation launch`: it starts the processes of one program and follows them.

`launch.run` is the whole of it. The package uses Waystation's errors and its agent, and nothing of arrays or
checkpoints, because every host of a program begins with it.
"""
