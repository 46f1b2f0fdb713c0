"""Pages and charts of training runs."""
