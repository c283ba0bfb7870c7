"""A run on disk: its folder, manifests, locks, disk space, tracking and processes."""
