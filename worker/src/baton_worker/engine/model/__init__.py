"""The model as data: its shape, and its weights as a checkpoint folder holds them.

Owns the reading of `config.json` and safetensors. Knows no framework, no KV and no request.
"""
