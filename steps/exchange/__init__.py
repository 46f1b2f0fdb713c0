"""Steps that export models to other projects' formats, and import them."""
