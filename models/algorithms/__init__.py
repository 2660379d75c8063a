"""The arithmetic of policy-gradient training: small pure functions, chosen by AlgorithmConfig. No packing, no trainer, no I/O.

Axis suffixes: E episodes of the whole batch, T tokens of one episode, B x T padded tokens, N the flat axis of policy-written
tokens (loss mask 1). ORACLES-style numbers and the invariances are held by tests/models/test_algorithms.py.
"""
