"""Training: data, networks, the Lightning modules, and the command line ``escnn-attention`` (extra ``train``).

Nothing is imported here, so that ``import escnn_attention`` never pulls in Lightning.
"""
