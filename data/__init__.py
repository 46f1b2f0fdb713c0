"""From documents to tokens, shuffled sequences and batches; imports no step, model or device."""
