"""A device over PyTorch: its memory, its stream and its graphs. Importing it loads PyTorch."""
