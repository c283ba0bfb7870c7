"""The reward in RL: verl's reward function, and the run's service that answers it.

`function` is what verl calls, `settings` what it reads; neither imports clients, ledger or Ray, so
that verl's reward workers start fast. `scorer` grades the samples in the service's own process.
"""
