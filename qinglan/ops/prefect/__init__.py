"""Everything that goes over the HTTP API of the site's Prefect server.

Nothing here imports Prefect.
"""
