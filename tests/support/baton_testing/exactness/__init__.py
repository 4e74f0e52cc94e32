"""What "the same bits" means, as properties that any engine can be asked for."""
