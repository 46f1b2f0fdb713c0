"""Documents to tokens to shuffled sequences to batches; no step, model or device is known here."""
