"""One module per row; each gives a `row()`."""
