"""`plan --on`: a step that trains on other hardware, by formula; the compiler checks if asked."""
