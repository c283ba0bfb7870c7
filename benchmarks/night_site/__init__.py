"""The parts of `nights.py`: a site, the services around it, faults, and what must be right."""
