"""What a step brings out: frozen snapshots, record columns, what prefill hands over, statistics.

Owns the boundary after which no later step changes what was emitted. Knows no forward pass.
"""
