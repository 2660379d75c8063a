"""The stages of one iteration, one file each: a plain function that reads immutable tables and writes one.

curate -> rollout (episode.py on Dask workers) -> score -> train -> publish -> evaluate; campaign.py drives them.
Nothing here imports Prefect; flows/ wraps these functions.
"""
