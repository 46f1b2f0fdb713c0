"""Generation: prefill, a loop over tokens with a key-value cache, and the choice of tokens."""
