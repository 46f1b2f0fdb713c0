"""Documents to tokens to shuffled sequences to batches.

In the order of the data: `source` names documents, `parquet` reads them, `sampling` chooses among
them, `tokenizer` and `cache` turn them into tokens at rest, `permutation` and `order` shuffle
by arithmetic, `loader` reads batches. No step, model or device is known here.
"""
