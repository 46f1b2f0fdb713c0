"""The token cache: ids on disk or in a bucket, every chunk checked when it is read."""
