"""Coverage-guided fuzzing of every reader: `make fuzz TIME=60`.

trees      checkpoints, files, pickles and documents as one tree, and edits of it by a few bytes
places     where a mutated checkpoint lies
oracles    what has to hold of what was read
targets    one for each reader: bytes to a right result, or a ZckptError
run        the loop: what else came out, and how much was run

An input of a target is bytes of what it reads, or (`Checkpoints`) a script: which checkpoint, what is done with it,
and edits of its tree.
"""
