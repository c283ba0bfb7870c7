"""What `faults.py` is made of: a site per trial, services with books, what strikes, and what must
hold afterwards."""
