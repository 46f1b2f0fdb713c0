"""Steps that make documents."""
