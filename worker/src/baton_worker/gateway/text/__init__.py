"""Between text and tokens: the tokenizer, its vocabulary, chat templates, detokenisation.

Knows no request, no worker and no HTTP.
"""
