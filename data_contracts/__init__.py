"""What crosses a boundary in Bessemer, and the rules it must keep.

Records, errors, configuration, protocols and the pure ledger live here. Importing this package pulls in no framework:
no torch, Prefect, Dask, MLflow, Docker or Great Expectations (tests/data_contracts/test_imports.py holds that).
"""
