"""Serving: the champion behind an OpenAI-compatible router that always answers, canary and rollback
included.

`site` keeps the models' processes in step with the registry, `router` answers requests; both meet
in `routes`.
"""
