"""`python -m zckpt`."""

from zckpt.cli import main

if __name__ == "__main__":  # workers of mpi4py.futures import it under another name
    main()
