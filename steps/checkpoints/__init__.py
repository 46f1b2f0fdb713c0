"""Finding a trained model's checkpoint and opening it."""
