"""Generation: prefill, a decoding loop with a KV cache, and token sampling."""
