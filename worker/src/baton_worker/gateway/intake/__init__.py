"""From the bytes of a request body to a `GenerationRequest`, or an error that names the field.

Owns every judgement about what a client sent. Knows no worker and no answer.
"""
