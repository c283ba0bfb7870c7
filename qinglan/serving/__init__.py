"""The champion behind an OpenAI-compatible router that always answers, with canaries and rollback.

`site` keeps the models' processes in step with the registry, `router` answers requests; both meet
in `routes`.
"""
