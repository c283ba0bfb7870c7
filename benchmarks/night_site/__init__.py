"""What `nights.py` is made of: a site, the services around it, what goes wrong, and what must be
right afterwards."""
