"""Operating a site: checks, estimates, the local site, deployments, clean-up and backup."""
