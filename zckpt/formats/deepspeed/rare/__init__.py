"""What few checkpoints have: rare optimizers, quantised state, what is not saved."""
