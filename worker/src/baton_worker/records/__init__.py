"""The step record: one packed, columnar, versioned frame per engine step and gateway."""
