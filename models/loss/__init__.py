"""Next-token loss: chunked cross-entropy with a custom backward pass."""
