"""What a user can do with checkpoints. An operation knows no format's file names and copies no bytes itself.

Each verb is a module with a function of its name; `zckpt` itself has them all.
"""
