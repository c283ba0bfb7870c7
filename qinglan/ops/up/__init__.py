"""`qinglan up`: supervised servers and workers on loopback, started and called over HTTP, never
imported."""
