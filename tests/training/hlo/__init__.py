"""What a compiled program does, read from its HLO text; for tests and benches."""
