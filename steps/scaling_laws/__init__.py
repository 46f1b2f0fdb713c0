"""Laws of how the loss falls with parameters and tokens: their fit and their predictions."""
