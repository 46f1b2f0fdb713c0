"""Reads documents from stores: listings, byte ranges, retries, file formats."""
