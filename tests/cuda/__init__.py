"""What only a GPU shows. `pytest -m cuda tests/cuda` on a machine that has one."""
