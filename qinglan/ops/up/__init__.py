"""`qinglan up`: supervised servers and workers on loopback.

They are started and called over HTTP, never imported.
"""
