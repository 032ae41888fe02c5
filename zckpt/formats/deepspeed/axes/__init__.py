"""Where a model-parallel rank's part is in the whole: tensor, pipeline, experts."""
