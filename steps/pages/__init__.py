"""Reports, comparisons and their charts."""
