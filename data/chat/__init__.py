"""Conversations: messages of rows, chat templates, ids with a loss mask, and rows of them."""
