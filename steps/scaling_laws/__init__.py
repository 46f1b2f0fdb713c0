"""Laws of how the loss falls with parameters and tokens: what is fitted, and what it predicts."""
