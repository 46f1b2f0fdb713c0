"""The record of a run, read from its events, and its page."""
