"""Next-token loss: cross entropy in chunks, with a backward pass of its own."""
