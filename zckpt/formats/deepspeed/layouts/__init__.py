"""One rank's optimizer state as DeepSpeed cuts it: flat, per parameter, or whole."""
