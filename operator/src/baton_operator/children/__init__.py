"""The objects that a PDDeployment owns: how each is made, named, recorded and written.

Rendering is pure (`renderer`, `desired`, `revision`, `resources`); `apply` and `revision_records`
write and read. Knows plans, not how they are made.
"""
