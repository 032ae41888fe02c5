"""`python -m zckpt`."""

from zckpt.cli import main

main()
