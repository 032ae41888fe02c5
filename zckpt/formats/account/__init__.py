"""The account of everything: who has what of each file, by crossing off what the checkpoint has taken.

It goes through directories and trees by itself and asks no adapter whether it has read a thing: what lies in no span,
copy or padding, is under no key of the metadata, and is spoken for by no rule, is left out.

    inventory   every file below the directory that was opened; rules for what is foreign
    values      files that hold values only, which are carried
    trees       every leaf of a file's tree, and which rule speaks for it
    ranges      which bytes of a file are elements of what
"""

from __future__ import annotations

from zckpt.formats.account.inventory import take_inventory

__all__ = ["take_inventory"]
