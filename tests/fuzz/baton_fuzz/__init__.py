"""What fuzzing feeds and what must hold for it."""
