"""Looking at runs: the record of one, read from its events, and its page."""
