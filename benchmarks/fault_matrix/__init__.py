"""The parts of `faults.py`: a site per trial, services with books, faults, and what must hold."""
