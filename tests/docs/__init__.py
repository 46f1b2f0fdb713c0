"""The pages of docs/, checked without building the site."""
