"""Trainings under FSDP1 and FSDP2 in gloo ranks, saved as verl saves them, with the truth about what was saved."""
