"""The model families that Baton runs, one file each, and what they share.

Owns what a `model_type` means beyond the sizes in its config.json: rotation, norms, biases, and the
names and the form of draft layers. `registry` lists them. docs/add-a-family.md says how one is
added. Knows no file, no weights and no framework.
"""
