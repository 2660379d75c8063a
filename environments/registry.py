"""Name -> domain and name -> verifier. Domains of this package are found here; others through an entry point group.

A third party adds a domain with the entry point group `bessemer.domains` (value: a Domain subclass).
"""
