"""The gateway: OpenAI-compatible HTTP in front, record links to the workers behind."""
