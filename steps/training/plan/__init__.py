"""What `plan` says of a training before it runs."""
